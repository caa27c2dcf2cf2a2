#!/usr/bin/env python3
"""gpushare exec: unmodified programs under a limit, by every way to the driver, without a daemon. See support.py. SPDX-License-Identifier: Apache-2.0"""

import os
import shutil
import subprocess
import sys
import time
import unittest

import support
from exec_support import Exec, build, has_shim
from support import OPTIONS


class Program(Exec):
    def test_exit_code_arguments_and_signals_are_the_programs(self):
        self.run_exec("--", "sh", "-c", "exit 41", code=41)
        self.run_exec("--", "sh", "-c", "kill -TERM $$", code=128 + 15)
        outcome = self.run_exec("--", "printf", "%s|", "a b", "", "--memory")
        self.assertEqual(outcome.out, "a b||--memory|")

    def test_a_missing_program_is_refused(self):
        outcome = self.run_exec("--", "no_such_program", code=2)
        self.assertIn("no program 'no_such_program' in PATH", outcome.err)
        self.assertIn("No such file", self.run_exec("--", "./nothing", code=2).err)
        self.assertIn("program", self.tool("exec", code=2).err)

    @unittest.skipUnless(os.getuid() == 0 and shutil.which("cc"), "needs root and a compiler")
    def test_what_cannot_be_held_is_refused_with_the_reason(self):
        source = self.file("main.c", "int main(void) { return 0; }\n")
        subprocess.run(["cc", "-static", str(source), "-o", str(self.folder / "static")], check=True)
        self.assertIn("linked statically", self.run_exec("--", "./static", code=2).err)
        script = self.file("script", f"#!{self.folder}/static\n")
        script.chmod(0o755)
        self.assertIn("linked statically", self.run_exec("--", "./script", code=2).err)
        other = self.folder / "other"
        shutil.copy("/bin/true", other)
        os.chown(other, 65534, 65534)
        other.chmod(0o4755)
        self.assertIn("setuid", self.run_exec("--", "./other", code=2).err)

    def test_settings_in_rising_strength(self):
        print_limit = ["--", "sh", "-c", "echo $GPUSHARE_MEMORY"]
        if not has_shim():
            self.skipTest("no shim in this build")
        self.assertEqual(self.run_exec(*print_limit, GPUSHARE_MEMORY="1GiB").out, "1073741824B\n")
        (self.folder / "config/gpushare").mkdir(parents=True)
        self.file("config/gpushare/exec.conf", "# limits\nmemory = 2GiB\n")
        self.assertEqual(self.run_exec(*print_limit, GPUSHARE_MEMORY="1GiB").out, "2147483648B\n")
        self.assertEqual(self.run_exec("--memory", "3GiB", *print_limit).out, "3221225472B\n")
        self.file("config/gpushare/exec.conf", "memory = 2GiB\nmemroy = 1\n")
        self.assertIn("exec.conf:2: 'memroy = 1' is not allowed", self.run_exec(*print_limit, code=2).err)
        self.file("config/gpushare/exec.conf", "weight = 2\nclass = opportunistic\n")
        print_all = ["--", "sh", "-c", "echo $GPUSHARE_WEIGHT $GPUSHARE_CLASS $GPUSHARE_PRIORITY $GPUSHARE_SOCKET"]
        self.assertEqual(self.run_exec("--weight", "0.5", "--priority=-1", "--socket", "s", *print_all, GPUSHARE_CLASS="x").out,
                         "0.5 opportunistic -1 s\n")
        for option, bad in [("weight", "0"), ("class", "royal"), ("priority", "high"), ("priority", "1.5"), ("cap", "30"), ("cap", "0%"), ("cap", "101%"),
                            ("cap", "much%")]:
            self.assertIn(f"--{option}", self.run_exec(f"--{option}", bad, *print_all, code=2).err)
        for option in ("memory", "pinned"):
            self.assertIn(f"--{option}: '8' has no unit: 8GiB or 8B?", self.run_exec(f"--{option}", "8", *print_all, code=2).err)
        self.assertIn("--memory: '8' has no unit", self.run_exec(*print_all, code=2, GPUSHARE_MEMORY="8").err)
        self.assertEqual(self.run_exec("--cap", "12.5%", "--", "sh", "-c", "echo $GPUSHARE_CAP").out, "12.5%\n")
        self.assertEqual(self.run_exec("--small-heap", "--", "sh", "-c", "echo $GPUSHARE_SMALL_HEAP").out, "1\n")
        self.file("config/gpushare/exec.conf", "small-heap = yes\n")
        self.assertIn("'yes' is not allowed", self.run_exec(*print_limit, code=2).err)
        self.file("config/gpushare/exec.conf", "fail = sometimes\n")
        self.assertIn("'sometimes' is not allowed", self.run_exec(*print_limit, code=2).err)
        file = self.folder / "config/gpushare/exec.conf"
        file.unlink()
        file.mkdir()  # root may read every file
        self.assertIn(f"cannot read '{file}': Is a directory", self.run_exec(*print_limit, code=1).err)

    def test_the_systems_file_is_weaker_than_the_users(self):
        if not has_shim():
            self.skipTest("no shim in this build")
        command = self.preloading_all([OPTIONS.tool, "exec", "--", "sh", "-c", "echo $GPUSHARE_MEMORY $GPUSHARE_WEIGHT"])

        def settings():
            return subprocess.run(command, env={**self.environment, "GPUSHARE_MEMORY": "1GiB"}, capture_output=True, text=True, check=True).stdout
        (self.folder / "etc/gpushare").mkdir(exist_ok=True)
        self.file("etc/gpushare/exec.conf", "memory = 4GiB\nweight = 3\n")
        self.assertEqual(settings(), "4294967296B 3\n")
        (self.folder / "config/gpushare").mkdir(parents=True)
        self.file("config/gpushare/exec.conf", "memory = 2GiB\n")
        self.assertEqual(settings(), "2147483648B 3\n")


class Held(Exec):
    def setUp(self):
        super().setUp()
        if not has_shim():
            self.skipTest("no shim in this build")

    def test_a_version_that_the_driver_has_not_is_answered_with_what_it_has(self):
        # The strict stand-in exports cuCtxSynchronize, and no cuCtxSynchronize_v2 of CUDA 13.
        program = self.python("""
function, status = ctypes.c_void_p(), ctypes.c_int()
assert cuda.cuInit(0) == 0
assert cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0) == 0 and cuda.cuCtxSetCurrent(context) == 0
assert cuda.cuGetProcAddress_v2(b"cuCtxSynchronize", ctypes.byref(function), 13000, ctypes.c_uint64(0), ctypes.byref(status)) == 0
print(ctypes.CFUNCTYPE(ctypes.c_int)(function.value)())
""")
        outcome = self.run_exec("--", *program, GPUSHARE_CUDA_DRIVER=str(build() / "lib/libcuda_standin.so"),
                                CUDA_STANDIN="leaks=0")
        self.assertEqual(outcome.out, "0\n")

    def test_every_way_to_the_driver_is_held(self):
        for way in ["soname", "path", "table", "deepbind", "linked"]:
            with self.subTest(way=way):
                outcome = self.run_exec("--memory", "1GiB", "--", self.probe, way, "info", "600", "600", "info")
                self.assertEqual(outcome.out.split(), ["1024", "1024", "0", "2", "1024", "424"])
        # With the driver in the process's scope, also by these.
        for way in ["default", "next"]:
            with self.subTest(way=way):
                outcome = self.run_exec("--memory", "1GiB", "--", self.probe, way, "600", "600")
                self.assertEqual(outcome.out.split(), ["0", "2"])

    def installed(self, name, *files):
        """A copy of the tool in a folder of that name, with these of the two libraries."""
        for file in ("bin/gpushare", *files):
            (self.folder / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(OPTIONS.tool if file == "bin/gpushare" else build() / file, self.folder / name / file)
        return [str(self.folder / name / "bin/gpushare"), "exec", "--memory", "1GiB"]

    def test_a_tool_in_a_folder_whose_name_separates_paths_for_the_loader(self):
        for name in ("a \u00fc (x), y", "b:c;d", "$ORIGIN"):
            with self.subTest(name=name):
                tool = self.installed(name, "lib/libgpushare_preload.so", "lib/gpushare/libcuda.so.1")
                for way in ("soname", "deepbind"):
                    done = subprocess.run([*tool, "--fail-closed", "--", "sh", "-c", f"exec '{self.probe}' {way} 600 600"], env=self.environment,
                                          capture_output=True, text=True)
                    self.assertEqual((done.stdout.split(), done.stderr), (["0", "2"], ""))

    def test_what_lacks_beside_the_tool_is_named(self):
        for name, files, missing in [("bare", [], "lib/libgpushare_preload.so"), ("half", ["lib/libgpushare_preload.so"], "lib/gpushare/libcuda.so.1")]:
            with self.subTest(name=name):
                tool = self.installed(name, *files)
                done = subprocess.run([*tool, "--", "echo", "ran"], env=self.environment, capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stdout), (0, "ran\n"))
                self.assertIn(f"the program runs without a limit: {self.folder}/{name}/{missing} is missing; install gpushare whole", done.stderr)
                (self.folder / name / "CMakeCache.txt").touch()
                done = subprocess.run([*tool, "--fail-closed", "--", "echo", "ran"], env=self.environment, capture_output=True, text=True)
                self.assertEqual((done.returncode, done.stdout), (3, ""))
                self.assertIn(f"{missing} is missing; build it: cmake --build '{self.folder}/{name}' --target gpushare_installed", done.stderr)

    def test_nvml_that_the_program_alone_finds_tells_of_the_limit(self):
        # Neither beside the driver nor in a folder that the loader searches.
        for folder in ("driver", "nvml"):
            (self.folder / folder).mkdir()
        os.symlink(self.driver, self.folder / "driver/libcuda_recorder.so")
        os.symlink(self.driver, self.folder / "nvml/libnvidia-ml.so.1")
        program = self.python(f"""
memory = (ctypes.c_uint64 * 3)()
print(ctypes.CDLL("{self.folder}/nvml/libnvidia-ml.so.1").nvmlDeviceGetMemoryInfo(None, memory), memory[0] >> 20)
""")
        outcome = self.run_exec("--memory", "64MiB", "--", *program, GPUSHARE_CUDA_DRIVER=str(self.folder / "driver/libcuda_recorder.so"))
        self.assertEqual(outcome.out, "0 64\n")

    def test_without_a_limit_programs_get_what_there_is(self):
        self.assertEqual(self.run_exec("--", self.probe, "soname", "info", "40000").out.split(), ["81920", "81920", "0"])

    def test_threads_that_begin_at_once(self):
        for _ in range(5):
            self.assertEqual(self.run_exec("--memory", "1GiB", "--", self.probe, "soname", "threads").out, "10\n")

    def test_exit_in_the_middle_of_a_launch(self):
        for _ in range(5):
            self.run_exec("--memory", "1GiB", "--", self.probe, "soname", "100", "launch", code=7)

    def test_the_processes_of_a_group_share_the_limit_and_the_killed_give_back(self):
        lines = self.script("""
            $PROBE soname 700 hold > first &
            while ! [ -s first ]; do sleep 0.02; done
            $PROBE path 700 info
            kill -9 $!
            wait $! 2>/dev/null
            $PROBE path 700 info""", "--memory", "1GiB")
        self.assertEqual(lines, ["2", "1024", "324", "0", "1024", "324"])

    def test_kills_at_random_points_leave_the_books_right(self):
        lines = self.script("""
            for i in 1 2 3 4 5 6 7 8 9 10 11 12; do
              $PROBE soname churn & a=$!
              $PROBE soname churn & b=$!
              sleep 0.0$i
              kill -9 $a; kill -9 $b
              wait $a $b 2>/dev/null
            done
            $PROBE soname info 1024""", "--memory", "1GiB")
        self.assertEqual(lines, ["1024", "1024", "0"])

    def test_above_the_soft_limit_there_is_host_memory(self):
        program = ["--", self.probe, "soname", "info", "700", "700", "info", "700", "pin:400", "300"]
        told = ["3072", "2048", "0", "0", "3072", "648", "2", "2", "0"]
        # The smaller is the device's in either order.
        for memory, soft in [("1GiB", "3GiB"), ("3GiB", "1GiB")]:
            outcome = self.run_exec("--memory", memory, "--soft", soft, "--pinned", "1GiB", *program)
            self.assertEqual(outcome.out.split(), told)
        self.assertIn("--soft", self.run_exec("--soft", "1GiB", *program, code=2).err)
        # Two processes of a group have the host's part together too.
        lines = self.script("""
            $PROBE soname 1024 900 hold > first &
            while ! [ "$(wc -l < first)" = 2 ]; do sleep 0.02; done
            $PROBE soname info 200 124 pin:1
            kill -9 $!
            wait $! 2>/dev/null
            $PROBE soname info pin:1024""", "--memory", "1GiB", "--soft", "3GiB", "--pinned", "1GiB")
        self.assertEqual(lines, ["3072", "124", "2", "0", "2", "3072", "2048", "0"])

    def test_limits_change_while_the_program_runs(self):
        with subprocess.Popen([OPTIONS.tool, "exec", "--memory", "1GiB", "--", self.probe, "soname", "700", "wait", "info", "300",
                               "wait", "info", "600", "pin:100", "wait", "pin:100", "info"], env=self.environment, stdin=subprocess.PIPE,
                              stdout=subprocess.PIPE, text=True) as running:
            def lines(count):
                return [running.stdout.readline().rstrip() for _ in range(count)]

            def change(*options):
                self.tool("exec", "--change", running.pid, *options, code=0)
                running.stdin.write("\n")
                running.stdin.flush()
            self.assertEqual(lines(1), ["0"])
            change("--memory", "512MiB")  # less than it holds, which stays
            self.assertEqual(lines(2), ["512 0", "2"])
            change("--memory", "1GiB", "--soft", "2GiB", "--pinned", "650MiB")
            self.assertEqual(lines(3), ["2048 974", "0", "2"])
            change("--pinned", "1GiB")
            self.assertEqual(lines(2), ["0", "2048 648"])
            self.assertEqual(running.wait(), 0)
        for options in [["--memory", "1GiB"], [], ["--soft", "1GiB"]]:
            self.refused(["exec", "--change", os.getpid(), *options], "--change" if options != ["--soft", "1GiB"] else "--memory")

    def test_a_context_larger_than_the_limit_is_refused(self):
        # The recording driver's contexts are made explicitly: unit tests hold the rest (shim_memory).
        outcome = self.run_exec("--memory", "64MiB", "--", self.probe, "soname", "65", "64")
        self.assertEqual(outcome.out.split(), ["2", "0"])

    def test_a_stripped_environment_is_held_where_the_system_preloads_the_library(self):
        # The shim comes by the environment and goes with it, unless /etc/ld.so.preload names it too.
        stripped = 'env -i "PROBE_DRIVER=$PROBE_DRIVER" $PROBE path'
        self.assertEqual(self.script(f"{stripped} 2000", "--memory", "1GiB"), ["0"])

        def lines(text, *options):
            command = self.preloading_all([OPTIONS.tool, "exec", *options, "--", "sh", "-c", text])
            done = subprocess.run(command, cwd=self.folder, env={**self.environment, "PROBE": self.probe}, capture_output=True, text=True, timeout=support.LONG_S)
            return done.stdout.split(), done.stderr
        limit = ("--memory", "1GiB")
        self.assertEqual(lines(f"{stripped} info 2000 600 600", *limit)[0], ["1024", "1024", "2", "0", "2"])
        # One limit with the group's other programs; a driver that only the group's settings name is found.
        text = f"""
            $PROBE soname 700 hold > first &
            while ! [ -s first ]; do sleep 0.02; done
            env -i $PROBE linked 700 info
            kill -9 $!
            wait $! 2>/dev/null
            {stripped} 700"""
        self.assertEqual(lines(text, *limit)[0], ["2", "1024", "324", "0"])
        # A program whose parents have all ended.
        text = f"""
            sh -c '(sleep 0.3; {stripped} info 2000 > late; echo > done) & exec true'
            while ! [ -e done ]; do sleep 0.02; done
            cat late"""
        self.assertEqual(lines(text, *limit)[0], ["1024", "1024", "2"])
        # A value that only the page has.
        out, err = lines(f"{stripped} 10 2000", "--memory", "1GiB", "--fail-closed")
        self.assertEqual((out, err), (["0", "2"], ""))
        # Programs of no group are left alone; a limit by hand holds.
        for more, expected in ({}, "0"), ({"GPUSHARE_MEMORY": "1G"}, "2"):
            done = subprocess.run(self.preloading_all([self.probe, "path", "2000"]), env={**self.environment, **more}, capture_output=True, text=True)
            self.assertEqual(done.stdout.split(), [expected], done.stderr)

    @unittest.skipUnless(os.getuid() == 0, "needs root")
    def test_a_setuid_program_is_held_where_the_system_preloads_the_library(self):
        self.folder.chmod(0o755)
        driver = self.folder / "libcuda.so.1"
        shutil.copy(self.driver, driver)
        probe = self.folder / "probe"
        shutil.copy(self.probe, probe)
        os.chown(probe, 0, 0)
        probe.chmod(0o4755)
        # In a secure program the environment's driver does not count, nor the page's: it opens its own.
        user = ["setpriv", "--reuid", "65534", "--clear-groups"]
        if subprocess.run([*user, OPTIONS.tool, "--version"], capture_output=True).returncode != 0:
            self.skipTest("another user cannot run the tool here")
        for fail in ([], ["--fail-closed"]):
            direct = self.preloading_all([*user, OPTIONS.tool, "exec", "--memory", "1GiB", *fail, "--", probe, "path", "2000", "600"])
            done = subprocess.run(direct, env={**self.environment, "PROBE_DRIVER": str(driver)}, capture_output=True, text=True, timeout=600)
            self.assertEqual((done.stdout.split(), done.returncode), (["2", "0"], 0), done.stderr)
            self.assertNotIn("not held", done.stderr)
        for text in (f"{probe} path info 2000 600", f"env -i PROBE_DRIVER={driver} {probe} path info 2000 600"):
            command = self.preloading_all([*user, OPTIONS.tool, "exec", "--memory", "1GiB", "--", "sh", "-c", text])
            done = subprocess.run(command, env={**self.environment, "PROBE_DRIVER": str(driver)}, capture_output=True, text=True, timeout=support.LONG_S)
            self.assertEqual(done.stdout.split(), ["1024", "1024", "2", "0"], done.stderr)

    def as_others(self):
        """Commands that start a program where the page's path says nothing or is forbidden; those that this machine permits."""
        for other in (["unshare", "-pf", "--mount-proc"], ["unshare", "-pf"], ["setpriv", "--reuid", "65534", "--clear-groups"]):
            with self.subTest(other=other):
                if subprocess.run([*other, OPTIONS.tool, "--version"], capture_output=True).returncode != 0:
                    self.skipTest(f"no right here to {other[0]}, or another user cannot run the tool")
                yield other

    def test_programs_of_other_namespaces_and_users_are_of_the_group(self):
        for other in self.as_others():
            # They inherit the page's descriptor. Bytes of a killed one are free for the others, and the other way round.
            text = f"""
                $PROBE soname 700 hold > first &
                while ! [ -s first ]; do sleep 0.02; done
                {" ".join(other)} $PROBE soname 600 300 info
                kill -9 $!
                wait $! 2>/dev/null
                {" ".join(other)} sh -c '$PROBE path 600 hold > second & while ! [ -s second ]; do sleep 0.02; done; $PROBE path 600; kill -9 $!; wait $!
                    $PROBE path 600 info' 2>/dev/null
                $PROBE path 1024"""
            self.file("first", "").chmod(0o666)
            self.file("second", "").chmod(0o666)
            self.folder.chmod(0o755)
            outcome = self.run_exec("--memory", "1GiB", "--fail-closed", "--", "sh", "-c", text, PROBE=self.probe)
            self.assertEqual(outcome.out.split(), ["2", "0", "1024", "24", "2", "0", "1024", "424", "0"])
            self.assertEqual(outcome.err, "")

    @unittest.skipUnless(os.getuid() == 0, "needs root")
    def test_a_process_whose_number_proc_does_not_have_gives_back(self):
        # Processes of a namespace whose /proc is another's, with numbers that nobody has there.
        number = 30000
        while os.path.exists(f"/proc/{number + 1}") or os.path.exists(f"/proc/{number + 2}"):
            number += 10
        text = f"unshare -pf sh -c 'echo {number} > /proc/sys/kernel/ns_last_pid && $PROBE path 600 && echo $$' && $PROBE path info 1024"
        outcome = self.run_exec("--memory", "1GiB", "--", "sh", "-c", f"{text} || echo no right", PROBE=self.probe)
        if "no right" in outcome.out:
            self.skipTest("no right here to unshare, or to set the next number of a process")
        self.assertEqual(outcome.out.split(), ["0", "1", "1024", "1024", "0"])

    def test_a_program_that_does_not_find_the_page_is_held_alone_or_refused(self):
        # Python closes what its programs should not inherit.
        closing = [sys.executable, "-c", "import subprocess, sys; sys.exit(subprocess.call(sys.argv[1:]))"]
        for other in self.as_others():
            program = ["--memory", "1GiB", "--", *closing, *other, self.probe, "soname", "600", "600"]
            outcome = self.run_exec(*program)
            self.assertEqual(outcome.out.split(), ["0", "2"])
            if other == ["unshare", "-pf"]:  # /proc is the same
                continue
            self.assertIn("is not there or may not be opened: this process counts alone", outcome.err)
            self.assertEqual(self.run_exec("--fail-closed", *program).out.split(), ["2", "2"])

    def test_programs_that_begin_after_gpushare_exec_has_ended_are_of_the_group(self):
        text = """
            tool=$PPID
            (while kill -0 $tool; do sleep 0.02; done
             $PROBE soname 700 hold > first &
             while ! [ -s first ]; do sleep 0.02; done
             $PROBE soname 700 info > second
             kill -9 $!
             echo > done) > /dev/null 2>&1 &"""
        self.script(text, "--memory", "1GiB", "--fail-closed")
        while not (self.folder / "done").exists():
            time.sleep(0.02)
        self.assertEqual((self.folder / "second").read_text().split(), ["2", "1024", "324"])

    def test_an_exec_under_another_is_a_group_of_its_own(self):
        lines = self.script(f"""
            $PROBE soname 700 hold > first &
            while ! [ -s first ]; do sleep 0.02; done
            "{OPTIONS.tool}" exec --memory 2GiB -- $PROBE soname info 1500
            kill -9 $!""", "--memory", "1GiB")
        self.assertEqual(lines, ["2048", "2048", "0"])

    def test_a_driver_that_is_not_there(self):
        program = ["--", *self.python("print(cuda.cuCtxCreate_v2(ctypes.byref(context), 0, 0))")]
        outcome = self.run_exec("--memory", "1GiB", *program, GPUSHARE_CUDA_DRIVER="/no/such/driver")
        self.assertEqual(outcome.out, "100\n")
        self.assertIn("cannot open GPUSHARE_CUDA_DRIVER=/no/such/driver", outcome.err)
        # A program that is linked to a driver has that one.
        outcome = self.run_exec("--memory", "1GiB", "--", self.probe, "linked", "10", "2000", GPUSHARE_CUDA_DRIVER="/no/such/driver")
        self.assertEqual((outcome.out.split(), outcome.err), (["0", "2"], ""))

    def test_a_device_without_an_address_is_not_counted_or_refused(self):
        program = ["--memory", "1GiB", "--", self.probe, "soname", "10", "2000"]
        outcome = self.run_exec(*program, RECORDER_NO_ADDRESS="1")
        self.assertEqual(outcome.out.split(), ["0", "0"])
        self.assertEqual(outcome.err.count("device 0: cuDeviceGetPCIBusId failed (999)"), 1)
        self.assertIn("no limit holds there", outcome.err)
        outcome = self.run_exec("--fail-closed", *program, RECORDER_NO_ADDRESS="1")
        self.assertEqual(outcome.out.split(), ["2", "2"])
        self.assertEqual(outcome.err.count("under a limit none is given"), 1)
        # No context either; and without a limit there is nothing to refuse.
        load = ["--", str(build() / "bin/shim_load"), "spin_10us", "1", "0"]
        outcome = self.run_exec("--fail-closed", "--memory", "1GiB", *load, code=1, RECORDER_NO_ADDRESS="1")
        self.assertIn("cuDevicePrimaryCtxRetain returned 2", outcome.err)
        self.run_exec("--fail-closed", *load, code=0, RECORDER_NO_ADDRESS="1")

    def test_a_page_that_cannot_be_used(self):
        program = [self.probe, "path", "10", "2000"]
        preloaded = {**self.environment, "LD_PRELOAD": self.preload, "GPUSHARE_MEMORY": "1G",
                     "GPUSHARE_SHIM_GROUP": "/no/such/page"}
        done = subprocess.run(program, env=preloaded, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split(), ["0", "2"])  # the limit of one process, from the environment
        self.assertIn("the group's page /no/such/page is not there or may not be opened: this process counts alone", done.stderr)
        strange = self.file("strange", "no page")
        done = subprocess.run(program, env={**preloaded, "GPUSHARE_SHIM_GROUP": str(strange)}, capture_output=True, text=True, check=True)
        self.assertIn("is not one of this version of gpushare: this process counts alone", done.stderr)
        done = subprocess.run(program, env={**preloaded, "GPUSHARE_SHIM_FAIL": "closed"}, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split(), ["2", "2"])
        # A limit that cannot be read.
        broken = {**preloaded, "GPUSHARE_SHIM_GROUP": "", "GPUSHARE_MEMORY": "8 apples"}
        done = subprocess.run(program, env=broken, capture_output=True, text=True, check=True)
        self.assertEqual(done.stdout.split(), ["0", "0"])
        self.assertIn("GPUSHARE_MEMORY=8 apples is not a number of bytes", done.stderr)
        done = subprocess.run(program, env={**broken, "GPUSHARE_MEMORY": "8"}, capture_output=True, text=True, check=True)
        self.assertIn("GPUSHARE_MEMORY=8 has no unit (8GiB or 8B?): this process has no such limit", done.stderr)
        page = self.file("page", "")  # whoever is first fills it in
        for more in ({"GPUSHARE_MEMORY": "8"}, {"GPUSHARE_CAP": "30"}, {"GPUSHARE_CAP": "0.3", "GPUSHARE_SHIM_GROUP": str(page)},
                     {"GPUSHARE_MEMORY": "8", "GPUSHARE_SHIM_GROUP": str(page)}, {"GPUSHARE_PINNED": "8"}):
            with self.subTest(more=more):
                environment = {**preloaded, "GPUSHARE_SHIM_GROUP": "", "GPUSHARE_MEMORY": "64GiB", **more}
                for fail in ("closed", "Closed", "1"):  # what cannot be read is no reason to hold less
                    done = subprocess.run(program, env={**environment, "GPUSHARE_SHIM_FAIL": fail}, capture_output=True, text=True, check=True)
                    self.assertEqual(done.stdout.split(), ["2", "2"])
                    self.assertIn("no memory is given", done.stderr)
                done = subprocess.run(program, env={**environment, "GPUSHARE_SHIM_FAIL": "open"}, capture_output=True, text=True, check=True)
                self.assertEqual(done.stdout.split(), ["0", "0"])
        self.assertIn("GPUSHARE_SHIM_FAIL=1 is neither open nor closed: it is closed", subprocess.run(
            program, env={**preloaded, "GPUSHARE_SHIM_FAIL": "1"}, capture_output=True, text=True, check=True).stderr)


if __name__ == "__main__":
    support.main()
