"""The dtypes that a run computes in, settled by what the nodes of the cluster compute fast, and what engines serve."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray

from rlpipe.actors.node_dtypes import ask_nodes, node_types
from rlpipe.actors.remote import get_remote
from rlpipe.configs.constraints import check_engine_dtype, check_model
from rlpipe.configs.schema.root_config import ClusterConfig
from rlpipe.errors import ConfigError
from rlpipe.hardware.dtype_speed import Products, kept_rates
from rlpipe.hardware.dtypes import AUTO, NARROW, WIDE, DeviceTypes, choose_dtype
from rlpipe.plan.dtype_work import scorer_products
from rlpipe.rollout.engine import resolve_engine
from rlpipe.rollout.serving_choice import serve_alone, settle_serving
from rlpipe.run.cluster import ResourceRequest
from rlpipe.run.prepare import Run
from rlpipe.scoring.pools import FEATURE_PATH
from rlpipe.scoring.rewards import RewardActor, load_reward

Ask = Callable[[ResourceRequest, str], Sequence[DeviceTypes]]
"""Returns the types of the devices that a process may be placed on; of CPUs with their speed in the given type."""


def resolve_dtype(
    run: Run, needs: Sequence[ResourceRequest], ask: Ask, *, begun: str | None = None
) -> tuple[Run, list[str]]:
    """Return the run with ``auto`` replaced by a type, and lines about the choice for the user.

    ``needs`` are those of the processes that hold the policy, all of which compute in the type. ``begun`` is the
    type of the checkpoint that the run resumes from, which ``auto`` keeps. Rewards with their own model choose its type
    when they load it; a line announces it if it differs from the policy's. Raises ``ConfigError`` if the model can't be
    used in the type.
    """
    requested = run.config.model.dtype
    measured = (begun or AUTO) if requested == AUTO else requested
    unique_needs = {(need.products, *sorted(need.requested.items())): need for need in needs}
    lines: list[str] = []
    dtype = requested
    if requested != WIDE:
        devices = [device for need in unique_needs.values() for device in ask(need, measured)]
        choice = choose_dtype(requested, devices, begun=begun)
        dtype, lines = choice.dtype, [choice.line] if choice.line else []
    resolved = _with_dtype(run, dtype)
    problems = [*check_model(resolved.model, on_gpu=run.config.learner.num_gpus > 0)]
    problems += check_engine_dtype(resolved.config) if run.config.algorithm.kind == "rl" else []
    for problem in problems:
        raise ConfigError(f"{problem} ({lines[0]})" if requested == AUTO and lines else problem)
    return resolved, [*lines, *_reward_lines(run, dtype, ask)]


def engine_type_lines(run: Run, engines: Sequence[ResourceRequest], ask: Ask) -> list[str]:
    """Return a line for the user if ``rollout.dtype`` is slow on a device of the engines."""
    requested = run.config.rollout.dtype
    if requested in (None, WIDE):
        return []
    devices = [device for need in {need.products: need for need in engines}.values() for device in ask(need, requested)]
    line = choose_dtype(requested, devices, option="rollout.dtype", fix="null is model.dtype").line
    return [] if line is None else [line]


def resolve_serving(run: Run) -> tuple[Run, list[str]]:
    """Return the run with ``weights.serve=auto`` replaced, and a line about the choice for the user."""
    requested = replace(run.config, model=run.model)
    settled, chosen = settle_serving(requested, resolve_engine(run.config.rollout))
    lines = [str(chosen)] if run.config.weights.serve == "auto" and run.model.adapter.kind != "none" else []
    return replace(run, config=replace(run.config, weights=settled.weights)), lines


def resolve_serving_alone(run: Run) -> Run:
    """Return a run without a learner with ``weights.serve=auto`` replaced; raise ``ModelError`` as ``serve_alone``."""
    weights = serve_alone(run.model, run.config.weights, resolve_engine(run.config.rollout))
    return replace(run, config=replace(run.config, weights=weights))


def _with_dtype(run: Run, dtype: str) -> Run:
    model = replace(run.config.model, dtype=dtype)
    return replace(run, config=replace(run.config, model=model), model=replace(run.model, dtype=dtype))


def _reward_lines(run: Run, policy_dtype: str, ask: Ask) -> Iterator[str]:
    for name, reward in run.rewards.items():
        option, model = f"scoring.rewards.{name}.kwargs.dtype", _reward_model(run, name)
        if reward.path == FEATURE_PATH:
            option = "model.dtype of algorithm.ebft.features"
        if model is None or model[1] == WIDE:
            continue
        source, requested = model
        products = None if reward.num_gpus else scorer_products(source, reward.num_cpus)
        need = ResourceRequest(name=name, num_cpus=reward.num_cpus, num_gpus=reward.num_gpus, products=products)
        choice = choose_dtype(requested, ask(need, requested), option=option)
        if choice.line is not None and (requested != AUTO or choice.dtype != policy_dtype):
            yield choice.line


def _reward_model(run: Run, name: str) -> tuple[str, str] | None:
    """Return the source and the requested type of a reward's own model, or None if it has none."""
    reward = run.rewards[name]
    if reward.path == FEATURE_PATH:
        return (run.model.path, run.config.model.dtype) if reward.is_served else None
    loaded = run.callables[name] if name in run.callables else load_reward(reward.path, reward.kwargs)
    if not (isinstance(loaded, type) and issubclass(loaded, RewardActor) and loaded.has_dtype):
        return None
    try:
        actor = loaded(**reward.kwargs)
    except ValueError as error:
        raise ConfigError(f"scoring.rewards.{name}.kwargs: {error}") from None
    return actor.source, actor.dtype


def ask_cluster(cluster: ClusterConfig, *, is_own: bool) -> Ask:
    """Return a function that asks each node for its types once; ``is_own``: the cluster is this machine alone."""
    types_by_node: dict[tuple[str, Products | None, str], list[DeviceTypes]] = {}

    def ask(need: ResourceRequest, dtype: str) -> list[DeviceTypes]:
        products = need.products
        # Unmeasured products are timed by another process, because this one does not import torch.
        if is_own and (products is None or kept_rates(products, NARROW if dtype == AUTO else dtype) is not None):
            return node_types(dtype, products)
        nodes = nodes_for(need, ray.nodes())
        new = [node for node in nodes if (node, products, dtype) not in types_by_node]
        for node, answer in zip(new, ask_nodes(new, dtype=dtype, products=products), strict=True):
            types_by_node[node, products, dtype] = get_remote(
                answer,
                "a node to report its compute types",
                within=cluster.start_timeout_s,
                option="cluster.start_timeout_s",
            )
        return [device for node in nodes for device in types_by_node[node, products, dtype]]

    return ask


def nodes_for(need: ResourceRequest, nodes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the ids of Ray's living nodes that meet a process's needs, or of all living nodes if none does alone."""
    alive = [node for node in nodes if node["Alive"]]
    matching = [
        node
        for node in alive
        if all(node["Resources"].get(name, 0) >= amount for name, amount in need.requested.items())
    ]
    return [node["NodeID"] for node in matching or alive]
