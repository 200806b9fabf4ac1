"""The direction of imports: a module imports only those listed above it, and engines only what is theirs."""

import ast
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "fusedattn"

# From the lowest layer to the highest.
LAYERS = (
    "errors enums settings",
    "cache counters store gpu_figures target bundle_format bundle_write",
    "arguments layouts spec lengths outputs tensor_pack",
    "reference rule rules_cudnn rules bundle",
    "plan",
    "engines engines.base engines.dropout engines.torch_math engines.torch_sequences engines.torch_blocks",
    "engines.torch_call engines.torch_flash engines.torch_runs engines.torch_padded engines.torch_tiled",
    "engines.stub_driver engines.cudnn_library engines.cudnn_key engines.cudnn_graph engines.cudnn_plan",
    "engines.cudnn_executor engines.cudnn_buckets engines.cudnn_operands engines.cudnn_lengths engines.cudnn_call",
    "engines.cudnn_parts engines.cudnn_bound engines.cudnn",
    "engines.self_test_problem engines.self_test_check engines.self_test",
    "devices runtime",
    "ops autograd calls bound",
    "attention_calls nvte_pack nvte_calls nvte attention explain __init__",
    "runs runs.fields runs.config runs.sweeps runs.laws runs.document runs.operands runs.random_inputs",
    "runs.file_inputs runs.case runs.inputs runs.load runs.budget runs.public_calls runs.oracle runs.sides",
    "runs.plan_builder runs.needed runs.dispatch_executor runs.dispatch_rivals runs.dispatch_calls runs.dispatch",
    "runs.memory runs.bench runs.verify runs.report runs.targets runs.compile runs.bundle_tables",
    "cli",
)
ORDER = [name for layer in LAYERS for name in layer.split()]
# What `import fusedattn` must not need.
LATE = {"typer", "rich", "yaml", "safetensors", "matplotlib", "cudnn", "cuda", "pynvml", "triton"}


def module_names() -> list[str]:
    names = [".".join(path.relative_to(PACKAGE).with_suffix("").parts) for path in PACKAGE.rglob("*.py")]
    return sorted(name.removesuffix(".__init__") for name in names)


def imported(source: str) -> set[str]:
    """Absolute names of the modules that a source imports anywhere, functions included."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide the direction"
            assert node.module is not None
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            # From a package come its modules, and what its __init__ defines.
            whole = {node.module} - ({"fusedattn"} if all(name.split(".", 1)[1] in ORDER for name in names) else set())
            found |= whole | names
    return found


def faults(name: str, source: str) -> list[str]:
    """Imports of package modules that do not stand above ``name``."""
    above = {f"fusedattn.{module}" for module in ORDER[: ORDER.index(name)]}
    if ORDER.index(name) > ORDER.index("__init__"):
        above |= {"fusedattn"}
    modules = {f"fusedattn.{module}" for module in ORDER} | {"fusedattn"}
    parents = {".".join(module.split(".")[:2]) for module in above}
    return sorted(module for module in imported(source) & modules if module not in above | parents)


def source_of(name: str) -> str:
    path = PACKAGE / name.replace(".", "/")
    return (path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text()


def test_every_module_has_its_place() -> None:
    assert module_names() == sorted(ORDER)


@pytest.mark.parametrize("name", ORDER)
def test_imports_point_down(name: str) -> None:
    assert faults(name, source_of(name)) == []


@pytest.mark.parametrize("name", [name for name in ORDER if not name.startswith(("runs", "cli"))])
def test_library_needs_no_optional_module(name: str) -> None:
    assert {module.partition(".")[0] for module in imported(source_of(name))} & LATE == set()


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("spec", "from fusedattn.runtime import forward"),
        ("engines.dropout", "import fusedattn.engines.torch_blocks"),
        ("reference", "from fusedattn.engines import torch_math"),
        ("errors", "def late():\n    import fusedattn.enums"),
        ("attention", "import fusedattn"),
    ],
)
def test_a_fault_is_seen(name: str, source: str) -> None:
    assert faults(name, source) != []


def test_modules_stay_small() -> None:
    sizes = {name: len(source_of(name).splitlines()) for name in ORDER}
    assert {name: size for name, size in sizes.items() if size > 300} == {}


def test_the_reference_shares_no_code_with_engines() -> None:
    assert {module for module in imported(source_of("reference")) if module.startswith("fusedattn")} == set()
