#!/usr/bin/env python3
"""gpushare exec: a program is held when its own library has reported, and never said to be otherwise. See support.py. SPDX-License-Identifier: Apache-2.0"""

import os
import shutil
import subprocess
import sys
import time
import unittest

import support
from exec_support import RUNTIME, Exec, Recorded, build, has_shim
from support import OPTIONS


class Held(Exec):
    def setUp(self):
        super().setUp()
        if not has_shim():
            self.skipTest("no shim in this build")

    def install(self, folder):
        """The tool and its libraries in a folder of their own, as an installation has them."""
        (folder / "bin").mkdir(parents=True)
        (folder / "lib/gpushare").mkdir(parents=True)
        shutil.copy(OPTIONS.tool, folder / "bin/gpushare")
        for name in ("libgpushare_preload.so", "gpushare/libcuda.so.1"):
            shutil.copy(build() / "lib" / name, folder / "lib" / name)
        return folder

    def exec_of(self, folder, *arguments, code=0, **more):
        done = subprocess.run([folder / "bin/gpushare", "exec", *map(str, arguments)], cwd=self.folder, env={**self.environment, **more},
                              capture_output=True, text=True, timeout=120)
        self.assertEqual(done.returncode, code, done.stderr)
        return done

    def test_a_program_whose_loader_does_not_load_the_library(self):
        folder = self.install(self.folder / "broken")
        # The loader reads the list and passes over what is no library.
        (folder / "lib/libgpushare_preload.so").write_text("no library")
        program = ["--", self.probe, "path", "2000", "hold"]
        closed = self.exec_of(folder, "--memory", "1GiB", "--fail-closed", *program, code=3)
        self.assertIn("was ended, because nothing holds it", closed.stderr)
        self.assertIn("--fail-closed", closed.stderr)
        running = subprocess.Popen([folder / "bin/gpushare", "exec", "--memory", "1GiB", *program], cwd=self.folder, env=self.environment,
                                   stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
        for line in running.stderr:  # the loader's line comes first
            if line.startswith("gpushare exec:"):
                break
        self.assertIn("is not held, it runs without limits", line)
        self.assertIsNone(running.poll())
        running.terminate()
        running.communicate()
        # One that ends at once.
        for options, code in [((), 7), (("--fail-closed",), 3)]:
            done = self.exec_of(folder, *options, "--", "sh", "-c", "exit 7", code=code)
            self.assertRegex(done.stderr, "gpushare exec: 'sh' .*(not held|nothing holds it)")

    @unittest.skipUnless(shutil.which("cc"), "needs a compiler")
    def test_a_program_that_does_not_report_in_time(self):
        # Its loader never comes to the library.
        loader = self.file("loader.c", 'void _start(void) { for (;;) __asm__ volatile("syscall" ::"a"(34) : "rcx", "r11", "memory"); }\n')  # pause
        subprocess.run(["cc", "-nostdlib", "-shared", "-fPIC", "-Wl,-e,_start", loader, "-o", self.folder / "loader"], check=True)
        source = self.file("main.c", "int main(void) { return 0; }\n")
        subprocess.run(["cc", source, "-o", self.folder / "program", f"-Wl,--dynamic-linker={self.folder}/loader"], check=True)
        outcome = self.run_exec("--memory", "1GiB", "--fail-closed", "--", "./program", code=3, GPUSHARE_SHIM_DEADLINE_MS="200")
        self.assertIn("has not reported within 0.2 s", outcome.err)

    def test_a_program_that_reports_and_never_calls_the_driver_is_no_error(self):
        for program in (["sh", "-c", "exit 7"], [sys.executable, "-c", "raise SystemExit(7)"]):
            outcome = self.run_exec("--memory", "1GiB", "--fail-closed", "--", *program, code=7)
            self.assertEqual(outcome.err, "")

    def test_an_installation_whose_path_has_spaces_and_other_letters(self):
        folder = self.install(self.folder / "a ü, (b)")
        done = self.exec_of(folder, "--memory", "1GiB", "--fail-closed", "--", self.probe, "path", "info", "2000", "600")
        self.assertEqual((done.stdout.split(), done.stderr), (["1024", "1024", "2", "0"], ""))
        done = self.exec_of(folder, "--memory", "1GiB", "--fail-closed", "--", self.probe, "soname", "info", "2000", "600")
        self.assertEqual((done.stdout.split(), done.stderr), (["1024", "1024", "2", "0"], ""))

    @unittest.skipUnless(shutil.which("cc"), "needs a compiler")
    def test_a_program_of_another_c_library_is_refused(self):
        source = self.file("main.c", "int main(void) { return 0; }\n")
        subprocess.run(["cc", source, "-o", self.folder / "other", "-Wl,--dynamic-linker=/lib/ld-musl-x86_64.so.1"], check=True)
        self.assertIn("its C library is musl", self.run_exec("--", "./other", code=2).err)

    def test_a_descendant_that_has_the_driver_and_not_the_library(self):
        stripped = f"env -i PROBE_DRIVER={self.driver} {self.probe} path 2000 hold"
        outcome = self.run_exec("--memory", "1GiB", "--fail-closed", "--", "sh", "-c", f"{stripped} & wait $!; exit 5", code=5)
        self.assertRegex(outcome.err, r"'shim_probe' \(process \d+\) was ended")
        text = f"{stripped} & echo $! > pid; while ! [ -e done ]; do sleep 0.02; done; kill -9 $!"
        with subprocess.Popen([OPTIONS.tool, "exec", "--memory", "1GiB", "--", "sh", "-c", text], cwd=self.folder, env=self.environment,
                              stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True) as running:
            line = running.stderr.readline()
            self.assertRegex(line, r"gpushare exec: 'shim_probe' \(process \d+\) is not held.*it has the CUDA driver")
            os.kill(int((self.folder / "pid").read_text()), 0)  # it runs on
            self.file("done", "")
            self.assertNotIn("is not held", running.communicate()[1])  # said once

    def test_every_driver_that_a_program_opens_is_the_same_one(self):
        first, second = self.folder / "libcuda.so.1", self.folder / "by another name.so"
        shutil.copy(self.driver, first)
        shutil.copy(self.driver, second)
        for driver in (first, second):
            for way in ("path", "table"):
                with self.subTest(driver=driver, way=way):
                    outcome = self.run_exec("--memory", "1GiB", "--", self.probe, way, "info", "2000", "600", "600", PROBE_DRIVER=str(driver))
                    self.assertEqual(outcome.out.split(), ["1024", "1024", "2", "0", "2"])
        # One after the other in a process, and the books are common.
        text = ("import ctypes, sys\n"
                "for name in sys.argv[1:]:\n"
                "    cuda, address, device = ctypes.CDLL(name), ctypes.c_uint64(), ctypes.c_int()\n"
                "    print(cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_uint64(400 << 20)), flush=True)\n")
        program = [*self.interpreter(), "-c", text, "libcuda.so.1", first, self.driver, second]
        self.assertEqual(self.run_exec("--memory", "1GiB", "--", *program).out.split(), ["0", "0", "2", "2"])

    @unittest.skipIf("ASAN_OPTIONS" in os.environ, "AddressSanitizer's runtime is there once in a process")
    def test_a_driver_in_a_namespace_of_the_loader_is_the_same_one(self):
        first, second = self.folder / "libcuda.so.1", self.folder / "by another name.so"
        shutil.copy(self.driver, first)
        shutil.copy(self.driver, second)
        text = ("import ctypes, sys\n"
                "libc, address = ctypes.CDLL(None), ctypes.c_uint64()\n"
                "libc.dlmopen.restype = libc.dlsym.restype = ctypes.c_void_p\n"
                "driver = ctypes.c_void_p(libc.dlmopen(-1, sys.argv[1].encode(), 2))\n"
                "allocate = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_uint64)(libc.dlsym(driver, b'cuMemAlloc_v2'))\n"
                "print(allocate(ctypes.addressof(address), 2000 << 20), allocate(ctypes.addressof(address), 600 << 20))\n")
        for driver in (first, second):
            self.assertEqual(self.run_exec("--memory", "1GiB", "--", *self.interpreter(), "-c", text, driver).out, "2 0\n")

    @unittest.skipIf(RUNTIME, "ThreadSanitizer's runtime is not for threads in a child of fork")
    def test_more_processes_than_a_page_once_had_places_for(self):
        text = ("import ctypes, os, sys\n"
                "cuda = ctypes.CDLL('libcuda.so.1')\n"
                "said, say = os.pipe()\n"
                "end, go = os.pipe()\n"
                "for _ in range(140):\n"
                "    if os.fork() == 0:\n"
                "        os.close(go)\n"
                "        address = ctypes.c_uint64()\n"
                "        os.write(say, b'%d' % (cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_uint64(300 << 20)) == 0))\n"
                "        os.read(end, 1)\n"
                "        os._exit(0)\n"
                "print(sum(int(os.read(said, 1)) for _ in range(140)))\n")
        self.assertEqual(self.run_exec("--memory", "1GiB", "--fail-closed", "--", *self.interpreter(), "-c", text).out, "3\n")

    @unittest.skipIf(RUNTIME or "ASAN_OPTIONS" in os.environ, "the program has a sanitizer's runtime of its own")
    @unittest.skipUnless(shutil.which("cc"), "needs a compiler")
    def test_who_stands_in_for_pthread_create_knows_of_every_thread(self):
        # ThreadSanitizer's runtime is such a one, and ends a program whose thread it does not know at the thread's first malloc.
        counts = ("#include <pthread.h>\n"
                  "static int made;\n"
                  "int pthread_create(pthread_t* t, const pthread_attr_t* a, void* (*body)(void*), void* argument) {\n"
                  "  static int (*next)(pthread_t*, const pthread_attr_t*, void* (*)(void*), void*);\n"
                  "  *(void**)&next = dlsym(RTLD_NEXT, \"pthread_create\");\n"
                  "  ++made;\n"
                  "  return next(t, a, body, argument);\n"
                  "}\n")
        program = ("#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n#include <stdlib.h>\n#include <unistd.h>\n%s"
                   "int main(void) {\n"
                   "  void *cuda = dlopen(getenv(\"PROBE_DRIVER\"), RTLD_NOW), *context;\n"
                   "  unsigned long long address;\n"
                   "  ((int (*)(unsigned))dlsym(cuda, \"cuInit\"))(0);\n"
                   "  ((int (*)(void*, int))dlsym(cuda, \"cuDevicePrimaryCtxRetain\"))(&context, 0);\n"
                   "  ((int (*)(void*))dlsym(cuda, \"cuCtxSetCurrent\"))(context);\n"
                   "  printf(\"%%d %%d\\n\", ((int (*)(void*, size_t))dlsym(cuda, \"cuMemAlloc_v2\"))(&address, 2000ul << 20), %s);\n"
                   "  return 0;\n}\n")
        for name, text, flags in (("counted", program % (counts, "made > 0"), ["-rdynamic"]), ("checked", program % ("", "1"), ["-fsanitize=thread"])):
            built = subprocess.run(["cc", "-w", self.file(f"{name}.c", text), "-o", self.folder / name, *flags, "-ldl", "-lpthread"], capture_output=True)
            if name == "checked" and (built.returncode != 0 or subprocess.run([self.folder / name], env=self.environment).returncode != 0):
                self.skipTest("no ThreadSanitizer here")
            with self.subTest(name):
                self.assertEqual(self.run_exec("--memory", "1GiB", "--fail-closed", "--", f"./{name}").out.split(), ["2", "1"])

    def test_a_group_inside_a_group_is_told_or_refused(self):
        inner = [OPTIONS.tool, "exec", "--memory", "2GiB", "--", self.probe, "path", "600", "info"]
        outcome = self.run_exec("--memory", "1GiB", "--", *inner)
        self.assertEqual(outcome.out.split(), ["0", "2048", "1448"])
        self.assertEqual(outcome.err.count("whose limits do not count"), 1)
        outcome = self.run_exec("--memory", "1GiB", "--fail-closed", "--", *inner, code=3)
        self.assertEqual((outcome.out, outcome.err.count("whose limits do not count")), ("", 1))
        self.assertEqual(self.run_exec("--memory", "2GiB", "--", self.probe, "path", "600", "info", GPUSHARE_SHIM_GROUP="").err, "")

    def test_a_process_that_runs_another_program_starts_anew(self):
        # The memory of the first has gone with its context.
        text = ("import ctypes, os, sys\n"
                "cuda, address = ctypes.CDLL('libcuda.so.1'), ctypes.c_uint64()\n"
                "assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_uint64(700 << 20)) == 0\n"
                "os.execv(sys.argv[1], sys.argv[1:])\n")
        outcome = self.run_exec("--memory", "1GiB", "--", *self.interpreter(), "-c", text, self.probe, "path", "info", "700", "info")
        self.assertEqual(outcome.out.split(), ["1024", "1024", "0", "1024", "324"])

    def test_the_library_is_replaced_while_a_program_runs(self):
        folder = self.install(self.folder / "installed")
        library = folder / "lib/libgpushare_preload.so"
        with subprocess.Popen([folder / "bin/gpushare", "exec", "--memory", "1GiB", "--", self.probe, "path", "600", "wait", "600", "info"],
                              cwd=self.folder, env=self.environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as running:
            self.assertEqual(running.stdout.readline(), "0\n")
            (folder / "lib/new").write_text("another version")  # docs/shim.md, "Get it": install -m
            os.replace(folder / "lib/new", library)
            self.assertEqual(running.communicate("\n")[0].split(), ["2", "1024", "424"])
            self.assertEqual(running.returncode, 0)


class Full(Recorded):
    def test_a_process_for_which_the_daemon_has_no_place_gets_no_context(self):
        self.start_daemon("socket", "--max-processes", "1")
        self.start("--memory", "8MiB", "--cap", "10%")
        while not any(process.kernels for process in self.recorded()[1]):
            time.sleep(0.02)
        outcome = self.run_exec("--memory", "8MiB", "--cap", "10%", "--", self.load, "spin_200us", "1", "0", code=1)
        self.assertIn("is refused a context", outcome.err)
        self.assertIn("--max-processes", outcome.err)


if __name__ == "__main__":
    support.main()
