"""Agents of NeMo Gym, which play episodes by HTTP: a row names the agent, whose ``/run`` gives the reward.

The agents ask the run's policy through a model server of NeMo Gym, which has one key for all of them. So the key of an
episode travels in the field ``user`` of each request, which NeMo Gym passes on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from rlpipe.common.formatting import printable
from rlpipe.episodes.agents import Access, AgentFailed, Reward
from rlpipe.errors import ConfigError
from rlpipe.scoring.http import JsonClient, RequestFailed
from rlpipe.scoring.nemo_gym import CREATE_PARAMS, reward_of, row_as_json

CONFIG_PATH = "/global_config_dict_yaml"
"""Path at which a head server gives the addresses of all servers."""
AGENTS_KEY = "responses_api_agents"
HEAD_TIMEOUT_S = 30.0


class GymAgent:
    """The agents of one NeMo Gym installation, by the URL of its head server.

    ``agent_ref.name`` of a row names the agent, otherwise ``name``. A run that can't be answered fails the episode; it
    is not repeated, as its turns were drawn already. Its time limit is the episode's.
    """

    def __init__(self, url: str, *, name: str, concurrency: int) -> None:
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.agent: {url!r:.200} is not the URL of NeMo Gym's head server")
        self._url, self._name, self._concurrency = url.rstrip("/"), name, concurrency
        self._clients: dict[str, JsonClient] = {}

    async def run(self, row: Mapping[str, Any], access: Access) -> Reward:
        named = row.get("agent_ref")
        name = str(named.get("name", self._name)) if isinstance(named, Mapping) else self._name
        if name not in self._clients:
            self._clients[name] = await self._client(name)
        try:
            return await self._clients[name].post("/run", run_request(row, access), reward_of)
        except RequestFailed:
            self._clients.pop(name, None)  # it may have started anew, at another address
            raise

    async def _client(self, name: str) -> JsonClient:
        agents = read_agents(await self._servers())
        if name not in agents:
            what = (
                f"there is no agent {name!r:.100}" if name else "no agent is named, by agent_ref of the row or by name"
            )
            raise AgentFailed(f"NeMo Gym at {self._url}: {what}; it has {', '.join(sorted(agents)) or 'none'}")
        return JsonClient(agents[name], timeout_s=None, retries=0, concurrency=self._concurrency)

    async def _servers(self) -> str:
        try:
            async with httpx.AsyncClient(timeout=HEAD_TIMEOUT_S) as client:
                response = await client.get(f"{self._url}{CONFIG_PATH}")
                response.raise_for_status()
        except httpx.HTTPError as error:
            raise AgentFailed(f"NeMo Gym's head server at {self._url} does not answer: {error!r:.300}") from error
        return response.text


def read_agents(text: str) -> dict[str, str]:
    """Return the URLs of agents by their names, from what a head server answers: YAML, or that in a JSON string."""
    try:
        found = yaml.safe_load(text)
        found = yaml.safe_load(found) if isinstance(found, str) else found
        config, agents = OmegaConf.create(found), {}
        for name, entry in found.items():
            for kind in (entry.get(AGENTS_KEY) or {}) if isinstance(entry, dict) else {}:
                server = config[name][AGENTS_KEY][kind]  # resolves references
                agents[str(name)] = f"http://{server.host}:{server.port}"
    except (yaml.YAMLError, OmegaConfBaseException, AttributeError, TypeError, ValueError) as error:
        raise AgentFailed(f"NeMo Gym's head server gives no list of servers: {printable(str(error))[:200]}") from error
    return agents


def run_request(row: Mapping[str, Any], access: Access) -> dict[str, Any]:
    """Return the body of a ``/run`` request: the row, whose model requests have the episode's key as ``user``.

    A row without ``responses_create_params`` gets them from its column ``prompt``.
    """
    params = row.get(CREATE_PARAMS) or {"input": row.get("prompt")}
    return {**row_as_json(row), CREATE_PARAMS: {**params, "user": access.api_key}}
