"""``lanterne run``: the command behaves as it would alone; Python under it watches for torch."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from lanterne.collector.integrations.launch import job_name, main, torchrun_at, with_tee
from lanterne.collector.integrations.standby import mode_of
from lanterne.errors import UsageError

RUN = [
    sys.executable,
    "-c",
    "import sys; from lanterne.collector.integrations.launch import main; sys.exit(main(sys.argv[1:]))",
]


def launch(*command: str, **more: str) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "LANTERNE_SHIPPER": "none", **more}
    return subprocess.run([*RUN, "--", *command], env=environ, capture_output=True, text=True, check=False)


def python(code: str, **more: str) -> subprocess.CompletedProcess[str]:
    return launch(sys.executable, "-c", textwrap.dedent(code), **more)


@pytest.mark.parametrize(
    ("command", "mode"),
    [
        ("torchrun --standalone --nproc-per-node 4 t.py", "ranks"),
        ("python3 -m torch.distributed.run --standalone t.py", "ranks"),
        ("torchrun --nproc-per-node 4 t.py", ""),  # the second would meet the first at its rendezvous
        ("torchrun --nnodes 2 --rdzv-endpoint h:1 t.py", ""),
        ("torchrun --standalone --no-python ./t.sh", ""),
        ("python train.py --standalone", "main"),
        ("python -u train.py", "main"),
        ("python -I train.py", ""),  # would not see the hook, and run
        ("python -sE train.py", ""),
        ("mpirun -n 4 python train.py", ""),
        ("./train.sh", ""),
    ],
)
def test_a_second_command_is_kept_only_where_it_does_not_meet_the_first(command: str, mode: str) -> None:
    words = command.split()
    at = torchrun_at(words)
    assert mode_of(words, at, words[at:]) == mode


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("pass", 0),
        ("raise SystemExit(3)", 3),
        ("raise RuntimeError('boom')", 1),
        ("import os; os._exit(7)", 7),
        ("import os, signal; os.kill(os.getpid(), signal.SIGTERM)", -15),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -9),
    ],
)
def test_exit_codes_and_deadly_signals_pass_through(code: str, expected: int) -> None:
    assert python(code).returncode == expected


def test_output_passes_through_byte_for_byte() -> None:
    code = "import os; os.write(1, b'out\\xff\\n'); os.write(2, b'a\\rb\\rprogress'); os.write(2, b'x\\n')"
    environ = {**os.environ, "LANTERNE_SHIPPER": "none"}
    done = subprocess.run([*RUN, "--", sys.executable, "-c", code], env=environ, capture_output=True, check=True)
    assert done.stdout == b"out\xff\n"
    assert done.stderr == b"a\rb\rprogressx\n"


def test_a_signal_to_the_launcher_reaches_the_command() -> None:
    code = """
        import signal, sys, time
        def stop(*_):
            print("stopping", flush=True)
            sys.exit(5)
        signal.signal(signal.SIGTERM, stop)
        print("ready", flush=True)
        time.sleep(60)
    """
    command = [*RUN, "--", sys.executable, "-c", textwrap.dedent(code)]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "LANTERNE_SHIPPER": "none"}
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "stopping\n"
        assert process.wait(timeout=30) == 5


def test_the_sitecustomize_that_was_there_still_runs(tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text("import builtins; builtins.mine = __name__\n")
    done = python(
        "import builtins, sitecustomize; print(builtins.mine, sitecustomize.__file__)", PYTHONPATH=str(tmp_path)
    )
    assert done.stdout.split() == ["sitecustomize", str(tmp_path / "sitecustomize.py")]


def test_a_python_that_never_imports_torch_pays_next_to_nothing() -> None:
    done = python(
        "import sys; print([m for m in sys.modules if m.startswith(('torch', 'opentelemetry', 'google', 'numpy'))])"
    )
    assert done.stdout == "[]\n"


def test_watched_modules_are_found_through_the_usual_finders_and_keep_their_source(tmp_path: Path) -> None:
    """A torch-like package stands in for a torch of any version; its optimizer takes its arguments as before."""
    package = tmp_path / "torch" / "optim"
    package.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("")
    (package / "__init__.py").write_text("from torch.optim import optimizer\n")
    (package / "optimizer.py").write_text(
        "class Optimizer:\n    def __init__(self, params, defaults):\n        self.given = (params, defaults)\n"
    )
    code = """
        import inspect, torch.optim
        Optimizer = torch.optim.optimizer.Optimizer
        print(Optimizer([1], {}).given, "class Optimizer" in inspect.getsource(torch.optim.optimizer),
              list(inspect.signature(Optimizer).parameters))
    """
    done = python(code, PYTHONPATH=str(tmp_path), WORLD_SIZE="2")  # several ranks: they have to find each other first
    assert done.stdout == "([1], {}) True ['params', 'defaults']\n", done.stderr


def test_the_environment_names_job_and_settings() -> None:
    done = python(
        "import os, json; print(json.dumps({k: v for k, v in os.environ.items() if k.startswith('LANTERNE_')}))",
        LANTERNE_ENDPOINT="http://backend:4318",
    )
    found = json.loads(done.stdout)
    assert found["LANTERNE_ENDPOINT"] == "http://backend:4318"
    assert found["LANTERNE_AUTO_ATTACH"] == "1"
    assert found["LANTERNE_JOB"].startswith("python")


def test_disabled_changes_nothing() -> None:
    ours = {k for k in os.environ if k.startswith("LANTERNE_")}
    done = python("import os; print(sorted(k for k in os.environ if k.startswith('LANTERNE_')))", LANTERNE_DISABLED="1")
    assert done.stdout.strip() == str(sorted(ours | {"LANTERNE_DISABLED", "LANTERNE_SHIPPER"}))


def test_stderr_of_a_torchrun_command_is_kept_by_torchrun() -> None:
    assert with_tee(["torchrun", "--nproc-per-node", "4", "train.py"], "/logs")[:5] == [
        "torchrun", "--tee", "2", "--log-dir", "/logs",
    ]  # fmt: skip
    module = ["python", "-m", "torch.distributed.run", "train.py"]
    assert with_tee(module, "/logs") == [*module[:3], "--tee", "2", "--log-dir", "/logs", "train.py"]


@pytest.mark.parametrize("theirs", [["--tee", "3"], ["-r", "1"], ["--log-dir=x"], ["--log_dir", "x"]])
def test_the_users_own_log_options_win(theirs: list[str]) -> None:
    command = ["torchrun", *theirs, "train.py"]
    assert with_tee(command, "/logs") == command


def test_options_of_the_script_are_not_torchruns() -> None:
    assert "--log-dir" in with_tee(["torchrun", "train.py", "--tee", "x"], "/logs")
    assert torchrun_at(["python", "train.py"]) == 0


def test_a_job_gets_a_name_only_where_no_other_node_must_agree() -> None:
    assert job_name(["torchrun", "--standalone", "a/pre train.py"], {}).startswith("pre-train-")
    assert job_name(["torchrun", "--nnodes", "2", "train.py"], {}) == ""
    assert job_name(["torchrun", "--rdzv-id", "7", "train.py"], {}) == ""
    assert job_name(["python", "train.py"], {"SLURM_JOB_ID": "12"}) == ""


def test_an_empty_or_unknown_command_says_what_to_do() -> None:
    with pytest.raises(UsageError, match="lanterne run -- torchrun"):
        main(["--"])
    with pytest.raises(UsageError, match="check the name and PATH"):
        main(["--", "no-such-program-here"])
