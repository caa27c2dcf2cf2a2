"""What concerns the whole process: exit, fork, signals, the tool, the description of the ABI. Each in a process of its own."""
import json
import os
import pickle
import re
import signal
import subprocess
import sys
import textwrap

import pytest

import gpushare


def python(code, **options):
    return subprocess.run([sys.executable, "-X", "faulthandler", "-c", textwrap.dedent(code)], capture_output=True, text=True, timeout=120, **options)


def test_exit_with_live_sessions_streams_and_queues():
    result = python("""
        import gpushare, threading
        runtime = gpushare.Runtime("host", capacity_bytes="16M", on_progress=lambda progress: None)
        session = runtime.open_session("a", ephemeral_bytes="1M")
        gpushare.set_log(lambda level, message: None)
        queue = gpushare.RequestQueue(runtime)
        queue.add_model(session, lambda iteration, batch: None)
        queue.submit(0, deadline=1)
        stream = runtime.create_stream()
        tickets = [session.submit(lambda iteration: iteration.launch(sum, [1, 2])) for _ in range(50)]
        iteration = runtime.open_session("b", ephemeral_bytes="1M").iteration()
        del iteration
        print("end")
    """)
    assert (result.returncode, result.stdout, result.stderr) == (0, "end\n", "")


def test_a_data_loader_forks_workers():
    result = python("""
        import gpushare, multiprocessing, os
        runtime = gpushare.Runtime("host", capacity_bytes="16M")
        session = runtime.open_session("training", persistent_bytes="1M", ephemeral_bytes="1M")
        weights = session.array((1024,))
        weights[:] = 1

        def worker(number):
            with gpushare.Runtime("host", capacity_bytes="16M") as own:   # a runtime of its own works
                with own.open_session("worker", ephemeral_bytes="1M") as loading:
                    with loading.iteration() as iteration:
                        iteration.array((16,))[:] = number
            return number

        with multiprocessing.get_context("fork").Pool(2) as pool:
            for result in pool.imap(worker, range(4)):
                with session.iteration() as iteration:
                    iteration.array((16,))[:] = result
        assert weights.sum() == 1024
        print("end")
    """)
    assert (result.returncode, result.stdout) == (0, "end\n"), result.stderr


def test_ctrl_c_ends_a_wait():
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent("""
        import gpushare, signal
        signal.signal(signal.SIGINT, signal.default_int_handler)   # a shell's background job begins with the signal ignored
        with gpushare.Runtime("host", capacity_bytes="16M", max_lanes=1) as runtime:
            holder = runtime.open_session("holder", persistent_bytes="12M", ephemeral_bytes="64K")
            holder.alloc("12M")
            waiting = runtime.open_session("waiting", persistent_bytes="12M", ephemeral_bytes="64K")
            try:
                print("waiting", flush=True)
                waiting.iteration()
            except KeyboardInterrupt:
                print("interrupted")
    """)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "waiting\n"
    process.send_signal(signal.SIGINT)
    rest, _ = process.communicate(timeout=600)
    assert (rest, process.returncode) == ("interrupted\n", 0)


def test_every_function_of_the_abi_is_described():
    import gpushare

    here = os.path.dirname(__file__)
    with open(os.path.join(here, "..", "..", "..", "c_api", "exports.txt"), encoding="utf-8") as file:
        names = [line.split("@")[0] for line in file if line.startswith("gpushare_")]
    assert names
    for name in names:
        getattr(gpushare.lib, name)  # AttributeError: not declared, or not in the library


def test_every_function_of_the_abi_is_wrapped():
    here = os.path.dirname(__file__)
    text = ""
    for file in os.listdir(os.path.join(here, "..", "gpushare")):
        if file.endswith(".py") and file != "_cffi.py":
            with open(os.path.join(here, "..", "gpushare", file), encoding="utf-8") as source:
                text += source.read()
    with open(os.path.join(here, "..", "..", "..", "c_api", "exports.txt"), encoding="utf-8") as file:
        names = {line.split("@")[0] for line in file if line.startswith("gpushare_")}
    # A backend is a table of C functions; a framework's allocator is called
    # by the framework's C++ for each block (gpushare.torch loads one); the version is text.
    excused = {name for name in names if name.startswith("gpushare_allocator_")} | {
        "gpushare_backend_register", "gpushare_version", "gpushare_last_error_message"}
    assert {name for name in names - excused if f"lib.{name}" not in text} == set()


def test_the_module_runs_the_tool():
    if not os.environ.get("GPUSHARE_TOOL_FOLDER"):
        pytest.skip("GPUSHARE_TOOL_FOLDER is not set")
    environment = dict(os.environ, PATH=os.environ["GPUSHARE_TOOL_FOLDER"] + os.pathsep + os.environ["PATH"])
    result = subprocess.run([sys.executable, "-m", "gpushare", "--help"], capture_output=True, text=True, timeout=600, env=environment)
    assert result.returncode == 0 and "replay" in result.stdout


def test_errors_reach_another_process_whole():
    for kind in (gpushare.QuotaExceeded, gpushare.IoError, gpushare.TimedOut):
        error = pickle.loads(pickle.dumps(kind("the message", kind("", 7).status, 5)))
        assert (type(error), str(error), error.status, error.native_code) == (kind, "the message", 7, 5)


# Defines the names that a page leaves to its reader. It runs before the snippets that need them.
READERS = """
import gpushare
runtime = gpushare.Runtime("host")
session = runtime.open_session("serving", memory="64M")
image, prompt, tokens = "an image", "a prompt", 100.0
def predict(payload):
    return payload
"""


@pytest.mark.parametrize("page", ["README.md", "docs/python.md"])
def test_the_scripts_of_the_pages_run(page):
    root = os.path.join(os.path.dirname(__file__), "..", "..", "..")
    with open(os.path.join(root, page), encoding="utf-8") as file:
        scripts = re.findall(r"```python\n(.*?)```", file.read(), re.DOTALL)
    assert scripts
    for script in scripts:
        whole = script if re.search(r"^(import|from) .*gpushare", script, re.MULTILINE) else READERS + script
        result = subprocess.run([sys.executable, "-W", "error", "-c", whole], capture_output=True, text=True, timeout=120)
        assert result.returncode == 0, script + result.stderr


@pytest.mark.parametrize("where", ["README.md", "examples/python/share.py"])
def test_first_samples_show_the_weights(where):
    """Shares near 2:1 of two sessions that have work all the time."""
    root = os.path.join(os.path.dirname(__file__), "..", "..", "..")
    with open(os.path.join(root, where), encoding="utf-8") as file:
        script = file.read()
    if where == "README.md":
        script = re.search(r"```python\n(.*?)```", script, re.DOTALL)[1]
    for _ in range(20):  # where the thread that submits or looks stood still, the sessions did not both have work until then
        done = subprocess.run([sys.executable, "-W", "error", "-c", script], capture_output=True, text=True, timeout=300)
        shares = {name: int(percent) for name, percent in re.findall(r"(\w+): \d+ ms, (\d+)% of", done.stdout)}
        assert done.returncode == 0 and sum(shares.values()) in (99, 100, 101), done
        if 58 <= shares["resnet"] <= 76:
            return
    raise AssertionError(done)


def test_engines_trade_the_memory_of_their_caches():
    """examples/python/kv_caches.py, which checks the pages' contents itself."""
    example = os.path.join(os.path.dirname(__file__), "..", "..", "..", "examples/python/kv_caches.py")
    done = subprocess.run([sys.executable, "-W", "error", example], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0 and re.search(r"code is busy +\d+ +24\n", done.stdout), done


def test_models_are_retrained_while_they_serve():
    """examples/python/retrain.py: what it measures is there; how much it is depends on the machine."""
    example = os.path.join(os.path.dirname(__file__), "..", "..", "..", "examples/python/retrain.py")
    done = subprocess.run([sys.executable, "-W", "error", example, "--scheduler", "none,uniform,gpushare", "--streams", "2", "--windows", "2",
                           "--window-s", "0.4", "--json"], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    results = [json.loads(line) for line in done.stdout.splitlines()]
    assert [result["scheduler"] for result in results] == ["none", "uniform", "gpushare"]
    for result in results:
        for window in result["windows"]:
            assert len(window["accuracy"]) == 2 and all(0 <= points <= 100 for points in window["accuracy"])
            assert 0 <= window["late"] <= 1 and set(window["completed"]) <= {"stream0", "stream1"}
            assert not (result["scheduler"] == "none" and (window["completed"] or window["decisions"]))


def test_the_benchmark_of_the_package_runs():
    script = os.path.join(os.path.dirname(__file__), "../../../benchmarks/python/binding_bench.py")
    done = subprocess.run([sys.executable, script, "2"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.count("by cffi") == 3, done.stdout + done.stderr
