"""``import fusedattn`` in a fresh process: works without what it does not need, and leaves no trace."""

import os
import subprocess
import sys
from pathlib import Path

BLOCK = """
import sys
for name in ('cudnn', 'cuda', 'cuda.core', 'pynvml', 'triton', 'matplotlib', 'typer', 'rich', 'yaml', 'safetensors'):
    sys.modules[name] = None
"""
CALL = """
import torch, fusedattn
q = torch.zeros(1, 2, 1, 1)
v = torch.tensor([4.0, 0.0]).view(1, 2, 1, 1)
bias = torch.tensor([3.0, 1.0]).log().view(1, 1, 1, 2)
print(round(fusedattn.fused_attention(q, q, v, bias)[0, 0, 0, 0].item(), 4))
"""


def run(code: str, home: Path) -> subprocess.CompletedProcess[str]:
    folders = dict.fromkeys(("HOME", "TMPDIR", "XDG_CACHE_HOME"), str(home))
    environment = os.environ | folders | {"CUDA_VISIBLE_DEVICES": ""}
    package = str(Path(__file__).parent.parent)
    environment["PYTHONPATH"] = os.pathsep.join([package, environment.get("PYTHONPATH", "")])
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return subprocess.run([sys.executable, "-c", code], cwd=home, env=environment, capture_output=True, text=True)


def test_computes_with_optional_modules_blocked_and_writes_nothing(tmp_path: Path) -> None:
    done = run(BLOCK + CALL, tmp_path)
    assert (done.returncode, done.stdout) == (0, "3.0\n"), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_block_blocks(tmp_path: Path) -> None:
    done = run(BLOCK + "import rich", tmp_path)
    assert done.returncode == 1
    assert "ModuleNotFoundError" in done.stderr


def test_a_broken_pynvml_is_not_asked(tmp_path: Path) -> None:
    (tmp_path / "pynvml.py").write_text("def __getattr__(name):\n    raise RuntimeError('no driver')")
    done = run(CALL + "print(fusedattn.explain(q, q, v).engine)", tmp_path)
    assert (done.returncode, done.stdout) == (0, "3.0\ntorch\n"), done.stderr


def test_loads_no_heavy_module(tmp_path: Path) -> None:
    heavy = ("typer", "rich", "yaml", "safetensors", "matplotlib", "torch._dynamo", "torch._inductor")
    code = "import sys, torch; torch_has = set(sys.modules); import fusedattn; "
    code += f"print(set({heavy}) & set(sys.modules) - torch_has)"
    done = run(code, tmp_path)
    assert done.stdout == "set()\n", done.stderr
    assert run(code.replace("import fusedattn", "import yaml"), tmp_path).stdout == "{'yaml'}\n"
