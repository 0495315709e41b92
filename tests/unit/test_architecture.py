"""The floors and fences of docs/architecture.md: imports point down, and heavy libraries stay where they belong."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FLOORS = [
    # The first entry that is the module, or a package above it, gives the floor.
    ("rlpipe.errors", 1),
    ("rlpipe.types", 1),
    ("rlpipe.imports", 1),
    ("rlpipe.folders", 1),
    ("rlpipe.units", 1),
    ("rlpipe.configs", 1),
    ("rlpipe.kernels", 2),
    ("rlpipe.algorithms", 3),
    ("rlpipe.data", 3),
    ("rlpipe.weights", 3),
    ("rlpipe.direct", 3),
    ("rlpipe.hardware", 3),
    ("rlpipe.hub", 3),
    ("rlpipe.conversion", 3),
    ("rlpipe.models", 3),
    ("rlpipe.nf4", 3),
    ("rlpipe.stored", 3),
    ("rlpipe.tiny", 3),
    ("rlpipe.training_record", 3),
    ("rlpipe.rollout", 4),
    ("rlpipe.learner", 4),
    ("rlpipe.scoring", 4),
    ("rlpipe.replay", 4),
    ("rlpipe.simulation", 4),
    ("rlpipe.offload", 4),
    ("rlpipe.plan", 4),
    ("rlpipe.tracking", 4),
    ("rlpipe.health", 4),
    ("rlpipe.waiting", 5),
    ("rlpipe.actors", 5),
    ("rlpipe.hosts", 6),
    ("rlpipe.preload", 6),
    ("rlpipe.placement", 6),
    ("rlpipe.learner_pool", 6),
    ("rlpipe.scorer_pool", 6),
    ("rlpipe.served_pool", 6),
    ("rlpipe.parts", 6),
    ("rlpipe.engine_pool", 6),
    ("rlpipe.news", 6),
    ("rlpipe.signals", 6),
    ("rlpipe.flow", 6),
    ("rlpipe.evaluation", 6),
    ("rlpipe.reporting", 6),
    ("rlpipe.prepare", 6),
    ("rlpipe.precision", 6),
    ("rlpipe.launch", 6),
    ("rlpipe.learner_fit", 6),
    ("rlpipe.learner_group", 6),
    ("rlpipe.controller", 6),
    ("rlpipe.pipeline", 6),
    ("rlpipe.generate", 7),
    ("rlpipe.inspect", 7),
    ("rlpipe.quickstart", 7),
    ("rlpipe.commands", 7),
    ("rlpipe.cli", 7),
    ("rlpipe.__main__", 7),
    ("rlpipe", 7),
]
FENCES = {
    "ray": {"rlpipe.actors", "rlpipe.waiting", "rlpipe.tracking.ray_metrics"}
    | {name for name, floor in FLOORS if floor == 6},
    "vllm": {
        "rlpipe.rollout.vllm_engine",
        "rlpipe.rollout.vllm_experts",
        "rlpipe.rollout.vllm_nf4",
        "rlpipe.rollout.vllm_transfer",
        "rlpipe.learner.nccl",
        "rlpipe.rollout.vllm_options",
        "rlpipe.rollout.vllm_worker",
    },
    "deepspeed": {"rlpipe.learner.zero3"},
    "torch.distributed.fsdp": {"rlpipe.learner.fsdp2", "rlpipe.offload"},
}
TORCH_FREE_FLOOR = 1


def modules() -> Iterator[tuple[str, Path]]:
    for folder in ("rlpipe", "actors", "kernels", "configs"):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            if folder == "rlpipe" and parts[1] in ("actors", "kernels", "configs"):
                continue  # the links; their targets are visited themselves
            name = ".".join(parts if folder == "rlpipe" else ("rlpipe", *parts)).removesuffix(".__init__")
            yield name, path


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} imports relatively"
            assert node.module is not None
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def is_in(module: str, package: str) -> bool:
    return module == package or module.startswith(f"{package}.")


def floor_of(module: str) -> int:
    return next(floor for package, floor in FLOORS if is_in(module, package))


MODULES = dict(modules())


def test_the_tree_is_found() -> None:
    assert {"rlpipe.types", "rlpipe.actors.replay", "rlpipe.kernels.logprob", "rlpipe.configs.schema"} <= MODULES.keys()


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_down(module: str) -> None:
    floor = floor_of(module)
    for imported in imports(MODULES[module]):
        if imported in MODULES and imported != "rlpipe":
            assert floor_of(imported) <= floor, (
                f"{module} (floor {floor}) imports {imported} of floor {floor_of(imported)}"
            )


@pytest.mark.parametrize("module", MODULES)
def test_heavy_libraries_stay_behind_their_fences(module: str) -> None:
    for imported in imports(MODULES[module]):
        for library, allowed in FENCES.items():
            if is_in(imported, library):
                assert any(is_in(module, package) for package in allowed), f"{module} imports {imported}"


@pytest.mark.parametrize("module", [name for name in MODULES if floor_of(name) == TORCH_FREE_FLOOR])
def test_the_first_floor_knows_no_torch(module: str) -> None:
    assert not [name for name in imports(MODULES[module]) if is_in(name, "torch") or is_in(name, "transformers")]


@pytest.mark.parametrize("module", MODULES)
def test_every_file_says_what_it_does(module: str) -> None:
    source = MODULES[module].read_text()
    assert not source.strip() or ast.get_docstring(ast.parse(source)), f"{module} has no docstring"


def test_the_linked_folders_are_no_packages_of_their_own() -> None:
    for folder in ("actors", "kernels", "configs"):
        assert not (ROOT / folder / "__init__.py").exists()
        assert (ROOT / "rlpipe" / folder).resolve() == ROOT / folder
