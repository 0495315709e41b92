"""A small NeMo Gym: head, agent, model and resources server, with the requests that the real ones make.

Of ``simple_agent`` and ``openai_model`` it has what they send: the agent seeds a session, asks the model server, which
has one key for all episodes, calls tools, and has the whole response verified.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from typing import Any

import aiohttp
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.Response]]
TOOL = {
    "type": "function",
    "name": "multiply",
    "description": "Multiplies.",
    "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    "strict": True,
}


class GymServers:
    """The servers, each on a port of its own; an asynchronous context manager."""

    def __init__(self) -> None:
        self.policy_base_url = ""
        """Address of the model server; in the real one, ``policy_base_url`` of its configuration."""
        self._open = AsyncExitStack()
        self.urls: dict[str, str] = {}
        self.asked: list[dict[str, Any]] = []
        """Bodies of ``/run`` requests."""
        self.fails = False

    async def __aenter__(self) -> GymServers:
        self._http = await self._open.enter_async_context(aiohttp.ClientSession())
        await self._serve("model", ("POST", "/v1/responses", self._model))
        await self._serve("resources", ("POST", "/seed_session", self._seed), ("POST", "/verify", self._verify))
        await self._serve("agent", ("POST", "/run", self._run))
        await self._serve("head", ("GET", "/global_config_dict_yaml", self._config))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._open.aclose()

    async def _serve(self, name: str, *routes: tuple[str, str, Handler]) -> None:
        app = web.Application()
        for method, path, handler in routes:
            app.router.add_route(method, path, handler)
        runner = web.AppRunner(app)
        await runner.setup()
        self._open.push_async_callback(runner.cleanup)
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        self.urls[name] = f"http://127.0.0.1:{runner.addresses[0][1]}"

    async def _config(self, _: web.Request) -> web.Response:
        host, port = self.urls["agent"].removeprefix("http://").split(":")
        text = (
            "head_server: {host: 127.0.0.1, port: 11000}\nhosts: {all: " + host + "}\n"
            "policy_model: {responses_api_models: {openai_model: {entrypoint: app.py, host: 127.0.0.1, port: 1}}}\n"
            "calculator: {responses_api_agents: {simple_agent: {entrypoint: app.py, host: '${hosts.all}', port: "
            + port
            + "}}}\n"
        )
        return web.json_response(text)  # the real one answers with a JSON string, too

    async def _run(self, request: web.Request) -> web.Response:
        row = await request.json()
        self.asked.append(row)
        await self._post("resources", "/seed_session", row)
        params, new = row["responses_create_params"], []
        given = params["input"]
        given = [{"role": "user", "content": given}] if isinstance(given, str) else given
        while True:
            answer = await self._post("model", "/v1/responses", {**params, "input": [*given, *new]})
            new += answer["output"]
            calls = [item for item in answer["output"] if item["type"] == "function_call"]
            for call in calls:
                arguments = json.loads(call["arguments"])
                output = str(arguments["a"] * arguments["b"])
                new.append({"type": "function_call_output", "call_id": call["call_id"], "output": output})
            if not calls or answer["incomplete_details"]:
                break
        return web.json_response(
            await self._post("resources", "/verify", {**row, "response": {**answer, "output": new}})
        )

    async def _model(self, request: web.Request) -> web.Response:
        body = {**await request.json(), "model": "policy"}
        headers = {"Authorization": "Bearer of the model server"}
        async with self._http.post(f"{self.policy_base_url}/responses", json=body, headers=headers) as answer:
            return web.json_response(await answer.json(), status=answer.status)

    async def _seed(self, _: web.Request) -> web.Response:
        return web.json_response({})

    async def _verify(self, request: web.Request) -> web.Response:
        if self.fails:
            return web.json_response({"detail": "no room"}, status=500)
        row = await request.json()
        text = row["response"]["output"][-1]["content"][0]["text"]
        return web.json_response({**row, "reward": float(str(row["verifier_metadata"]["answer"]) in text)})

    async def _post(self, server: str, path: str, body: dict[str, Any]) -> Any:
        async with self._http.post(f"{self.urls[server]}{path}", json=body) as answer:
            answer.raise_for_status()
            return await answer.json()
