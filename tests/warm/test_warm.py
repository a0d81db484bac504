"""Warm programs behave as those of a new interpreter do, and share only imports."""

import ast
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.helpers import PATIENCE_S, PROGRAM_S, until

pytestmark = pytest.mark.skipif(
    warm.python() == sys.executable, reason="no server of warm programs here"
)


def run(*words: str, **options: Any) -> subprocess.CompletedProcess[str]:
    options = {"capture_output": True, "text": True, "timeout": PROGRAM_S, **options}
    return subprocess.run([warm.python(), *words], **options)


def test_what_lightning_imports_is_there_and_no_more() -> None:
    names = {"torch", "lightning", "tests.helpers", "lightning_adpsgd.reference"}
    done = run("-c", f"import sys; print({names} & set(sys.modules))")
    assert done.stderr == ""
    assert ast.literal_eval(done.stdout) == {"torch", "lightning"}


def test_the_interpreter_of_tests_is_none_of_them() -> None:
    program = "import sys; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True)
    assert done.stdout == b"False\n"


def test_a_program_has_words_folder_environment_and_files(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, beside\n"
        "print(__name__, sys.argv, os.getcwd())\n"
        "print(os.environ['HERE'], os.environ.get('HOME'))\n"
        "print(sys.stdin.read(), file=sys.stderr)"
    )
    (tmp_path / "beside.py").touch()
    done = run("script.py", "a", "b c", cwd=tmp_path, env={"HERE": "x"}, input="said")
    words = "['script.py', 'a', 'b c']"
    assert done.stdout == f"__main__ {words} {tmp_path}\nx None\n"
    assert done.stderr == "said\n"


def test_modules_are_found_in_the_folder_and_in_pythonpath(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "first.py").write_text("import second")
    (tmp_path / "second.py").write_text("print('second')")
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = run("-m", "first", cwd=tmp_path / "here", env=environment)
    assert done.stdout == "second\n"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("pass", 0),
        ("import sys; sys.exit(3)", 3),
        ("import sys; sys.exit('lost')", 1),
        ("raise KeyError('lost')", 1),
        ("raise KeyboardInterrupt('lost')", -2),
        ("import os; os._exit(4)", 4),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
    ],
)
def test_a_program_ends_with_its_exit_code(program: str, code: int) -> None:
    done = run("-c", program)
    assert done.returncode == code
    assert ("lost" in done.stderr) == ("lost" in program)


@pytest.mark.parametrize("words", [(), ("-Xfinalize",)])
def test_handlers_of_the_exit_run_after_threads_have_ended(words: Any) -> None:
    program = (
        "import atexit, threading, time\n"
        "atexit.register(print, 'last')\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()\n"
        "class Left:\n"
        "    def __del__(self, print=print): print('left')\n"
        "left = Left()\n"
        "print('main')"
    )
    said = ["main", "thread", "last", *(["left"] if words else [])]
    assert run(*words, "-c", program).stdout.split() == said


WAITS = (
    "import os, signal, sys, time\n"
    "signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(7))\n"
    "print(os.getpid(), flush=True)\n"
    "time.sleep(60)"
)


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGTERM, 7),
        (signal.SIGINT, -2),
        (signal.SIGKILL, -9),
        (signal.SIGUSR1, -10),
    ],
)
def test_a_signal_reaches_the_program(number: int, code: int) -> None:
    process = subprocess.Popen([warm.python(), "-c", WAITS], stdout=subprocess.PIPE)
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.send_signal(number)
    process.communicate(timeout=PATIENCE_S)
    assert process.returncode == code
    until(lambda: not Path(f"/proc/{pid}").exists(), "the end of the program")


def test_a_program_of_a_program_is_warm_too() -> None:
    inner = "import sys; print('lightning' in sys.modules)"
    outer = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    assert run("-c", outer).stdout == "True\n"


def loaded(queue: Any) -> None:
    queue.put((multiprocessing.parent_process() is not None, "torch" in sys.modules))


def test_a_spawned_process_is_warm_and_keeps_its_pipes() -> None:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=loaded, args=(queue,))
    process.start()
    assert queue.get(timeout=PROGRAM_S) == (True, True)
    process.join(PATIENCE_S)
    assert process.exitcode == 0


def test_a_program_may_fork_learners_that_could_use_a_gpu() -> None:
    program = (
        "import os, torch\n"
        "if os.fork() == 0:\n"
        "    print(torch.cuda._is_in_bad_fork(), flush=True)\n"
        "    os._exit(0)\n"
        "os.wait()"
    )
    assert run("-c", program).stdout == "False\n"


def test_an_option_that_is_not_known_is_refused() -> None:
    done = run("-I", "-c", "pass")
    assert done.returncode == 1
    assert "takes no option -I" in done.stderr


def test_an_output_ends_with_its_program() -> None:
    """The server does not hold on to the pipe, nor does another program."""
    reader, writer = os.pipe()
    with os.fdopen(reader) as stream:
        run("-c", "print('said')", capture_output=False, stdout=writer)
        os.close(writer)
        assert stream.read() == "said\n"


def test_what_a_program_takes_is_told_to_its_test() -> None:
    before = warm.processor_seconds().get("tests/warm/test_warm.py", 0.0)
    run("-c", "import time\nwhile time.process_time() < 0.2: pass")
    after = warm.processor_seconds()["tests/warm/test_warm.py"]
    assert 0.1 < after - before < PROGRAM_S
