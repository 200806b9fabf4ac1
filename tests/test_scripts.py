"""The scripts, run in a copy whose PATH holds stand-ins for Python, pip and uv: nothing is installed here."""

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
BASH = shutil.which("bash") or "bash"
TOOLS = ["bash", "cat", "cksum", "cp", "dirname", "env", "flock", "grep", "mkdir", "rm", "sleep", "touch"]

# What every stand-in does first: one line in the log, each argument in brackets.
LOG = """#!{bash}
{{ printf '%s' "${{0##*/}}"; printf ' [%s]' "$@"; echo; }} >>"{log}"
"""

# `-c CODE` runs in the real Python under the stand-in's version.
CODE = """
if [ "$1" = -c ]; then
    exec "{python}" -S -c "import sys; sys.version_info = ({version}, 7, 'final', 0)
$2"
fi
"""

VENV_WORKS = """
mkdir -p "$3/bin" && cp "{venv}"/* "$3/bin/"
"""

# As on Debian without python3-venv.
VENV_FAILS = """
mkdir -p "$3/bin" && touch "$3/bin/half-made"
echo "ensurepip is not available."
exit 1
"""

UV = """
case $1 in
    --version) ;;
    venv) mkdir -p .venv/bin && cp "{venv}"/* .venv/bin/ ;;
    pip) echo "uv talks"; exit "${{PIP_STATUS:-0}}" ;;
esac
"""

# The Python inside .venv: import pip, pip install, pytest.
VENV_PYTHON = """
case "$*" in
    "-c import pip") exit "${{NO_PIP:-0}}" ;;
    -c*) ;;
    *"pip install"*)
        echo "pip talks"
        touch "{log}.installing"
        sleep "${{PIP_SECONDS:-0}}"
        exit "${{PIP_STATUS:-0}}" ;;
    *pytest*) echo "1 passed in 0.01s"; exit "${{PYTEST_STATUS:-0}}" ;;
esac
"""

INSTALL = "python [-m] [pip] [install] [--disable-pip-version-check] [-e] "


class Copy:
    """A copy of the scripts, in a path with spaces, beside a PATH of stand-ins."""

    def __init__(self, tmp_path: Path) -> None:
        self.tree = tmp_path / "a tree"
        self.bin = tmp_path / "bin"
        self.log = tmp_path / "log"
        self.inside = tmp_path / "inside"  # what a new .venv/bin holds
        self.installing = tmp_path / "log.installing"
        self.venv = self.tree / ".venv"
        self.stamp = self.venv / "fusedattn-installed"
        shutil.copytree(ROOT / "scripts", self.tree / "scripts")
        shutil.copytree(ROOT / ".ci", self.tree / ".ci")
        shutil.copy(ROOT / "pyproject.toml", self.tree)
        self.bin.mkdir()
        self.inside.mkdir()
        for tool in TOOLS:
            if found := shutil.which(tool):
                (self.bin / tool).symlink_to(found)
        for name in ("fusedattn", "ruff", "mypy"):
            self.write(self.inside / name, "")
        self.write(self.inside / "python", VENV_PYTHON)
        self.python("python3", VENV_WORKS)

    def write(self, path: Path, body: str, **values: str) -> None:
        path.write_text((LOG + body).format(bash=BASH, log=self.log, venv=self.inside, **values))
        path.chmod(0o755)

    def python(self, name: str, venv: str, version: str = "3, 12") -> None:
        self.write(self.bin / name, CODE + venv, python=sys.executable, version=version)

    def uv(self) -> None:
        self.write(self.bin / "uv", UV)

    def start(self, script: str, *args: str, **env: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            [BASH, str(self.tree / script), *args],
            cwd="/",
            env={"PATH": str(self.bin), **env},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def run(self, script: str, *args: str, **env: str) -> "subprocess.CompletedProcess[str]":
        process = self.start(script, *args, **env)
        out, err = process.communicate(timeout=60)
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    def calls(self, text: str = "") -> list[str]:
        """The calls with this text since the last look, without those that only ask (`-c`, `--version`)."""
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        self.log.unlink(missing_ok=True)
        return [line for line in lines if text in line and "[-c]" not in line and "[--version]" not in line]

    def start_and_wait_for_pip(self, script: str) -> "subprocess.Popen[str]":
        """The script, stopped in the middle of its pip install."""
        process = self.start(script, PIP_SECONDS="60")
        deadline = time.monotonic() + 30
        while not self.installing.exists():
            assert time.monotonic() < deadline, "pip was never called"
            time.sleep(0.01)
        return process


@pytest.fixture
def copy(tmp_path: Path) -> Copy:
    return Copy(tmp_path)


def test_the_first_run_makes_a_venv_and_the_second_only_runs(copy: Copy) -> None:
    command = "python [-m] [pytest] [-n] [auto]"
    first = copy.run("scripts/test")
    assert first.returncode == 0, first.stderr
    assert copy.calls() == ["python3 [-m] [venv] [.venv]", INSTALL + "[.[test]]", command]
    assert not (copy.venv / "unfinished").exists()
    assert first.stdout == "1 passed in 0.01s\n"

    second = copy.run("scripts/test")
    assert (second.returncode, second.stderr) == (0, "")
    assert copy.calls() == [command]


def test_each_script_installs_the_extras_that_it_needs(copy: Copy) -> None:
    for script, install in [("quickstart", "[.]"), ("test", "[.[test]]"), ("check", "[.[test,check]]")]:
        assert copy.run(f"scripts/{script}").returncode == 0
        assert copy.calls("pip") == [INSTALL + install], script
    for script in ("quickstart", "test", "check"):
        assert copy.run(f"scripts/{script}").returncode == 0
        assert copy.calls("pip") == [], script


def test_a_changed_pyproject_installs_again_into_the_same_venv(copy: Copy) -> None:
    copy.run("scripts/test")
    copy.calls()
    with (copy.tree / "pyproject.toml").open("a") as file:
        file.write("# changed\n")
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls()[:1] == [INSTALL + "[.[test]]"]


def test_a_copied_tree_does_not_run_the_code_of_the_first(copy: Copy) -> None:
    copy.run("scripts/test")
    copy.calls()
    copy.tree = copy.tree.rename(copy.tree.with_name("moved"))
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls("pip") == [INSTALL + "[.[test]]"]


@pytest.mark.parametrize(
    ("script", "command"),
    [("quickstart", "fusedattn [run] [configs/quickstart.yaml]"), ("test", "python [-m] [pytest] [-n] [auto]")],
)
def test_arguments_pass_on_untouched(copy: Copy, script: str, command: str) -> None:
    assert copy.run(f"scripts/{script}", "-k", "a b", "*", "", "$HOME").returncode == 0
    assert copy.calls()[-1] == command + " [-k] [a b] [*] [] [$HOME]"


def test_the_status_of_the_command_is_the_status_of_the_script(copy: Copy) -> None:
    assert copy.run("scripts/test", PYTEST_STATUS="5").returncode == 5


def test_check_runs_every_check_and_stops_at_the_first_that_fails(copy: Copy) -> None:
    layers = "python [-m] [pytest] [-q] [tests/test_layers.py]"
    checks = ["ruff [check]", "ruff [format] [--check]", "mypy []", layers]
    assert copy.run("scripts/check").returncode == 0
    assert copy.calls()[2:] == checks
    copy.write(copy.venv / "bin" / "mypy", "exit 3")
    assert copy.run("scripts/check").returncode == 3
    assert copy.calls() == checks[:3]


def test_uv_steps_in_where_venv_fails(copy: Copy) -> None:
    copy.python("python3", VENV_FAILS)
    copy.uv()
    result = copy.run("scripts/test", NO_PIP="1")
    assert result.returncode == 0, result.stderr
    assert copy.calls() == [
        "python3 [-m] [venv] [.venv]",
        "uv [venv] [--quiet] [--allow-existing] [--python] [python3] [.venv]",
        "uv [pip] [install] [--python] [.venv/bin/python] [-e] [.[test]]",
        "python [-m] [pytest] [-n] [auto]",
    ]
    assert result.stdout == "1 passed in 0.01s\n"
    assert not (copy.venv / "bin" / "half-made").exists()
    assert not (copy.venv / "unfinished").exists()
    assert copy.run("scripts/test", NO_PIP="1").returncode == 0
    assert copy.calls() == ["python [-m] [pytest] [-n] [auto]"]


def test_without_venv_and_uv_the_word_names_both_remedies(copy: Copy) -> None:
    copy.python("python3", VENV_FAILS)
    result = copy.run("scripts/test")
    assert result.returncode != 0
    assert result.stdout == ""
    assert "ensurepip is not available." in result.stderr
    assert "apt install python3-venv" in result.stderr
    assert "uv on PATH" in result.stderr
    assert ".venv holds no" not in result.stderr
    assert not copy.venv.exists()
    assert copy.calls() == ["python3 [-m] [venv] [.venv]"]


def test_a_uv_that_does_not_work_is_no_uv(copy: Copy) -> None:
    copy.python("python3", VENV_FAILS)
    copy.write(copy.bin / "uv", "exit 127")
    result = copy.run("scripts/test")
    assert result.returncode != 0
    assert "apt install python3-venv" in result.stderr
    assert copy.calls("uv") == []


def test_too_old_a_python_has_its_own_word(copy: Copy) -> None:
    copy.python("python3", VENV_WORKS, version="3, 9")
    copy.write(copy.bin / "python3.12", "exit 127")
    result = copy.run("scripts/test")
    assert result.returncode != 0
    assert "needs Python 3.10 or newer: python3 here is 3.9.7" in result.stderr
    assert "python3-venv" not in result.stderr
    assert not copy.venv.exists()
    assert copy.calls() == []


def test_a_missing_python_has_that_word_too(copy: Copy) -> None:
    (copy.bin / "python3").unlink()
    result = copy.run("scripts/test")
    assert result.returncode != 0
    assert "needs Python 3.10 or newer: python3 here is missing" in result.stderr


def test_a_newer_python_beside_an_old_python3_is_taken_if_it_works(copy: Copy) -> None:
    copy.python("python3", VENV_WORKS, version="3, 9")
    copy.write(copy.bin / "python3.12", "exit 127")  # as a pyenv shim of a version that is not active
    copy.python("python3.10", VENV_WORKS, version="3, 10")
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls()[0] == "python3.10 [-m] [venv] [.venv]"


def test_uv_brings_a_python_where_all_are_too_old(copy: Copy) -> None:
    copy.python("python3", VENV_WORKS, version="3, 9")
    copy.uv()
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls()[0] == "uv [venv] [--quiet] [--allow-existing] [--python] [>=3.10,<3.14] [.venv]"


def test_a_failed_install_is_tried_again(copy: Copy) -> None:
    result = copy.run("scripts/test", PIP_STATUS="7")
    assert result.returncode == 7
    assert copy.calls("pytest") == []
    assert not copy.stamp.exists()
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls() == [INSTALL + "[.[test]]", "python [-m] [pytest] [-n] [auto]"]


def test_a_failed_install_takes_back_the_stamp_of_the_one_before(copy: Copy) -> None:
    assert copy.run("scripts/test").returncode == 0
    assert copy.run("scripts/check", PIP_STATUS="7").returncode == 7
    copy.calls()
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls("pip") == [INSTALL + "[.[test]]"]


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_an_interrupted_install_leaves_no_stamp(copy: Copy, how: signal.Signals) -> None:
    process = copy.start_and_wait_for_pip("scripts/test")
    os.killpg(process.pid, how)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not copy.stamp.exists()
    copy.calls()
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls("pip") == [INSTALL + "[.[test]]"]


def test_an_interrupted_venv_is_made_anew(copy: Copy) -> None:
    copy.python("python3", 'mkdir -p "$3/bin" && touch "$3/bin/half-made"; kill -KILL 0')
    assert copy.run("scripts/test").returncode == -signal.SIGKILL
    assert (copy.venv / "bin" / "half-made").exists()
    copy.python("python3", VENV_WORKS)
    copy.calls()
    assert copy.run("scripts/test").returncode == 0
    assert copy.calls()[0] == "python3 [-m] [venv] [.venv]"
    assert not (copy.venv / "bin" / "half-made").exists()


def test_a_venv_that_does_not_work_is_named_and_left_alone(copy: Copy) -> None:
    (copy.venv / "bin").mkdir(parents=True)
    (copy.venv / "mine").touch()
    result = copy.run("scripts/test")
    assert result.returncode != 0
    assert ".venv holds no working Python 3.10 or newer" in result.stderr
    assert (copy.venv / "mine").exists()
    assert copy.calls() == []


def test_a_venv_whose_python_went_away_is_named(copy: Copy) -> None:
    copy.run("scripts/test")
    (copy.venv / "bin" / "python").unlink()
    result = copy.run("scripts/test")
    assert result.returncode != 0
    assert ".venv holds no working Python 3.10 or newer" in result.stderr


def test_a_venv_without_pip_and_no_uv_is_named(copy: Copy) -> None:
    result = copy.run("scripts/test", NO_PIP="1")
    assert result.returncode != 0
    assert ".venv has no pip and uv is not on PATH" in result.stderr
    assert not copy.stamp.exists()


def test_two_scripts_at_once_install_once(copy: Copy) -> None:
    if shutil.which("flock") is None:
        pytest.skip("no flock here: the scripts do without the lock")
    both = [copy.start("scripts/test", PIP_SECONDS="0.2") for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 0, err
    assert copy.calls("pip") == [INSTALL + "[.[test]]"]


def test_ci_runs_check_and_test_and_removes_its_venv(copy: Copy) -> None:
    result = copy.run(".ci/run")
    assert result.returncode == 0, result.stderr
    calls = copy.calls()
    assert [line for line in calls if "pytest" in line] == [
        "python [-m] [pytest] [-q] [tests/test_layers.py]",
        "python [-m] [pytest] [-n] [auto]",
    ]
    assert len([line for line in calls if "pip" in line]) == 1
    assert result.stdout.splitlines()[-1] == "1 passed in 0.01s"
    assert not copy.venv.exists()


@pytest.mark.parametrize("broken", ["check", "test"])
def test_ci_fails_where_either_fails_and_still_runs_both(copy: Copy, broken: str) -> None:
    if broken == "check":
        copy.write(copy.inside / "mypy", "exit 3")
    else:
        copy.write(copy.inside / "python", 'case "$*" in *auto*) exit 3;; esac')
    assert copy.run(".ci/run").returncode == 3
    assert copy.calls()[-1] == "python [-m] [pytest] [-n] [auto]"
    assert not copy.venv.exists()


def test_ci_leaves_a_venv_that_was_there(copy: Copy) -> None:
    shutil.copytree(copy.inside, copy.venv / "bin")
    assert copy.run(".ci/run").returncode == 0
    assert (copy.venv / "bin" / "python").exists()


def test_ci_removes_its_venv_when_stopped(copy: Copy) -> None:
    process = copy.start_and_wait_for_pip(".ci/run")
    assert copy.venv.exists()
    os.killpg(process.pid, signal.SIGTERM)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert not copy.venv.exists()


@pytest.mark.parametrize("name", ["scripts/quickstart", "scripts/test", "scripts/check", ".ci/run"])
def test_the_scripts_are_executable(name: str) -> None:
    assert os.access(ROOT / name, os.X_OK)
