#!/usr/bin/env python3
"""Measurement 10 of the GPU suite without PyTorch, GPU and gpushare: what it starts, what it makes of the answers, what it refuses. A shell script
stands for gpushare, another for nvidia-cuda-mps-control, and a third for the training, which tells steps by the weight it was given.
SPDX-License-Identifier: Apache-2.0"""
import os
import pathlib
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
import torch_exec  # noqa: E402

# Refuses what the shim would refuse: sizes that are no numbers, --soft or --pageable without what they need.
TOOL = """#!/bin/sh
echo "gpushare $*" >> "$LOG"
command=$1; shift
if [ "$command" = daemon ]; then
  trap 'echo "daemon ended" >> "$LOG"; exit 0' TERM
  while [ $# -gt 0 ]; do [ "$1" = --socket ] && : > "$2"; shift; done
  while :; do sleep 0.05; done
fi
UNDER=exec
while [ "$1" != -- ]; do
  case $1 in
    --fail-closed) shift; continue ;;
    --pageable) shift; UNDER=pageable; continue ;;
    --memory) [ "${2%B}" -gt 0 ] || exit 2 ;;
    --soft) [ "${2%B}" -gt 0 ] || exit 2; UNDER=soft ;;
    --weight) UNDER=$2 ;;
    --socket) [ -e "$2" ] || exit 3 ;;
    *) exit 2 ;;
  esac
  shift 2
done
shift
export UNDER
exec "$@"
"""
MPS = """#!/bin/sh
echo "mps $*" >> "$LOG"
if [ "$1" = -f ]; then
  : > "$CUDA_MPS_PIPE_DIRECTORY/control"
  while [ -e "$CUDA_MPS_PIPE_DIRECTORY/control" ]; do sleep 0.05; done
elif [ "$1" = -q ]; then
  rm "$CUDA_MPS_PIPE_DIRECTORY/control"
else
  read word && [ "$word" = quit ] && rm "$CUDA_MPS_PIPE_DIRECTORY/control"
fi
"""
# One that also knows protocol 3: servers and namespaces of its configuration have folders, and in each the rate that its clients get.
MPS_V3 = """#!{python}
import os, pathlib, sys, time, tomllib
pipe = pathlib.Path(os.environ["CUDA_MPS_PIPE_DIRECTORY"])
with open(os.environ["LOG"], "a") as log:
    print("mps", *sys.argv[1:], file=log)
if sys.argv[1] != "-f":
    (pipe / "control").unlink()
    sys.exit()
def makes(folder, rate):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "rate").write_text(str(rate))
    (folder / "control").touch()
if "-a" in sys.argv:
    assert sys.argv[2:5] == ["-p", "3", "-a"], sys.argv
    config = tomllib.loads(pathlib.Path(sys.argv[5]).read_text())
    assert config["schema_version"] == "1.0"
    for name, server in config["servers"].items():
        makes(pipe / name, server.get("timeslice_pct", 100))
        chunks = {{part["name"]: part["chunks"] for device in server.get("devices", []) for part in device["sm_partitions"]}}
        for space, what in server.get("namespaces", {{}}).items():
            makes(pipe / name / space, 100 * chunks[what["devices"][0]["sm_partition"]] / 16)
            assert what["devices"][0]["uuid"] == "GPU-1"
(pipe / "control").touch()
while (pipe / "control").exists():
    time.sleep(0.05)
"""
# A training that makes 100 steps/s alone, and beside another what its weight or percentage says. It reports one second of
# training, whatever duration it is asked for.
TRAINING = """
[ "$UNDER" = "$BROKEN" ] && { echo "CUDA out of memory" >&2; exit 1; }
[ -n "$NO_GPU" ] && { echo "PyTorch sees no GPU" >&2; exit 3; }
case $UNDER in
  "") rate=$(cat "$CUDA_MPS_PIPE_DIRECTORY/rate" 2> /dev/null || echo ${CUDA_MPS_ACTIVE_THREAD_PERCENTAGE:-100}) ;;
  exec) rate=99.5 ;;
  soft) rate=40 ;;
  pageable) rate=45 ;;
  *) rate=$UNDER ;;
esac
echo '{"total_bytes": 85899345920, "used_bytes": 2147483648, "reserved_bytes": 1610612736}'
while read seconds; do echo "{\\"marks\\": [[0, 0], [1, $rate]], \\"loss\\": 1.0}"; done
"""


class Suite(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.log = self.folder / "log"
        self.log.touch()
        (self.folder / "training").write_text(TRAINING)
        self.script("gpushare", TOOL)

    def script(self, name, text):
        (self.folder / name).write_text(text)
        (self.folder / name).chmod(0o755)

    def run_suite(self, *arguments, status=0, **environment):
        done = subprocess.run([sys.executable, HERE / "torch_exec.py", "--python", "sh", "--program", self.folder / "training", *arguments],
                              capture_output=True, text=True, timeout=120,
                              env={"PATH": f"{self.folder}:/usr/bin:/bin", "LOG": str(self.log), "BROKEN": "nothing", **environment})
        self.assertEqual(done.returncode, status, done.stdout + done.stderr)
        return [line.split("\t") for line in done.stdout.splitlines()], self.log.read_text()

    def test_all_sections(self):
        self.script("nvidia-cuda-mps-control", MPS)
        lines, log = self.run_suite("--quick")
        lines = [line for line in lines if "30:70, under CUDA MPS" not in line[1]]
        self.assertEqual([line for line in lines if line[0] != "row"], [])
        rows = {(what, by): [float(sample) for sample in samples.split()] for _, what, by, _, samples in lines}
        for network in torch_exec.NETWORKS:
            for by in ("gpushare exec", "gpushare exec, daemon"):
                self.assertAlmostEqual(rows[f"excess over alone against alone, {network}, at most 1%: not decided", by][0], 0.502513, 5)
        for a, b in torch_exec.SPLITS:
            name = f"two side by side, {a}:{b}"
            self.assertEqual(rows[f"{name}, share of the first, {a}% within 2 points: not decided", "gpushare exec"], [a])
            self.assertEqual(rows[f"{name}, share of the first", "CUDA MPS"], [a])
            self.assertEqual(rows[f"{name}, together of what each makes alone", "gpushare exec"], [100])
        self.assertEqual(rows["two side by side, no weights, share of the first", "time slicing"], [50])
        self.assertEqual(rows["two side by side, no weights, share of the first", "CUDA MPS"], [50])
        self.assertEqual(rows["training with two thirds of its memory on the device, of what it makes alone", "gpushare exec --soft"], [40])
        self.assertEqual(rows["two side by side, together 1.5 times the capacity, together of what each makes alone", "gpushare exec --pageable"], [90])
        # Limits: a quarter above what is used; on the device, what is used less a third of PyTorch's own; promised, two thirds of both.
        whole = (2 << 30) * 5 // 4
        self.assertIn(f"--memory {whole}B --soft {(2 << 30) - (1 << 29)}B -- ", log)
        self.assertRegex(log, f"daemon --socket .* --device cuda --policy srtf --capacity {2 * whole * 2 // 3}B\n")
        self.assertNotRegex(log, "--soft.*--pageable|--pageable.*--soft")
        self.assertEqual(log.count("daemon ended"), 3)
        self.assertIn("mps -f\n", log)

    @unittest.skipIf(sys.version_info < (3, 11), "no tomllib")
    def test_weighted_slices_and_partitions_of_mps(self):
        self.script("nvidia-cuda-mps-control", MPS_V3.format(python=sys.executable))
        self.script("nvidia-smi", "#!/bin/sh\n[ \"$*\" = '--query-gpu=uuid --format=csv,noheader' ] && echo GPU-1\n")
        lines, log = self.run_suite("--quick", "--sections", "shares")
        self.assertEqual([line for line in lines if line[0] != "row"], [])
        rows = {(what, by): [float(sample) for sample in samples.split()] for _, what, by, _, samples in lines}
        name = "two side by side, 30:70, share of the first"
        self.assertEqual(rows[name, "CUDA MPS"], [30])
        self.assertEqual(rows[name, "CUDA MPS, weighted time slices"], [30])
        self.assertEqual(rows[name, "CUDA MPS, static SM partitions"], [31.25])  # 5 of 16 chunks
        self.assertEqual(log.count("mps -f -p 3 -a "), 2)
        self.assertEqual(log.count("mps -q"), 2)

    def test_an_mps_without_protocol_3_has_no_such_rows(self):
        self.script("nvidia-cuda-mps-control", MPS.replace('if [ "$1" = -f ]; then', '[ "$2" = -p ] && exit 1\nif [ "$1" = -f ]; then'))
        self.script("nvidia-smi", "#!/bin/sh\necho GPU-1\n")
        lines, _ = self.run_suite("--quick", "--sections", "shares")
        skipped = {line[1]: line[2] for line in lines if line[0] == "skip"}
        self.assertEqual(skipped, {f"two side by side, 30:70, under CUDA MPS, {which}": "nvidia-cuda-mps-control ended with status 1"
                                   for which in ("weighted time slices", "static SM partitions")})
        self.assertEqual({line[2] for line in lines if line[0] == "row"}, {"gpushare exec", "time slicing", "CUDA MPS"})

    def test_an_mps_that_does_not_start_is_left_out(self):
        self.script("nvidia-cuda-mps-control", "#!/bin/sh\nexit 1\n")
        lines, _ = self.run_suite("--quick", "--sections", "shares")
        self.assertIn(["skip", "two side by side under CUDA MPS", "nvidia-cuda-mps-control ended with status 1"], lines)
        self.assertEqual({line[2] for line in lines if line[0] == "row"}, {"gpushare exec", "time slicing"})

    def test_a_program_that_fails_ends_its_section_only(self):
        lines, log = self.run_suite("--repeats", "3", "--seconds", "1", "--sections", "oversubscribed,alone", BROKEN="soft")
        self.assertEqual(lines[0], ["skip", "oversubscribed", "CUDA out of memory"])
        self.assertEqual([line[0] for line in lines[1:]], 12 * ["row"])
        rows = {(what, by): samples.split() for _, what, by, _, samples in lines[1:]}
        self.assertEqual(rows["excess over alone against alone, conv, at most 1%: met", "gpushare exec"], 3 * ["0.502513"])
        self.assertEqual(log.count("daemon ended"), 2)

    def test_refusals(self):
        lines, log = self.run_suite(status=3, NO_GPU="1")
        self.assertEqual((lines, log), ([["PyTorch sees no GPU"]], ""))
        lines, _ = self.run_suite(status=3, GPUSHARE_TOOL="/no/such/gpushare")
        self.assertEqual(lines, [["no gpushare to run: /no/such/gpushare"]])
        self.run_suite("--sections", "alone,none", status=2)


class Figures(unittest.TestCase):
    def test_rates_are_of_the_common_time(self):
        first, second = [[0, 0], [10, 100]], [[5, 0], [6, 4], [20, 60]]
        self.assertEqual(torch_exec.rates([first, second]), [10, 4])
        self.assertEqual(torch_exec.rates([first]), [10])
        with self.assertRaises(RuntimeError):
            torch_exec.rates([[[0, 0], [1, 9]], [[2, 0], [3, 9]]])

    def test_verdict(self):
        self.assertEqual(torch_exec.verdict([0.4, 0.5, 0.6], 1, [0.4, 0.5, 0.6], [-0.1, 0, 0.1]), "met")
        self.assertEqual(torch_exec.verdict([1.4, 1.5, 1.6], 1, [1.4, 1.5, 1.6], [-0.1, 0, 0.1]), "missed")
        self.assertEqual(torch_exec.verdict([0.4, 0.5, 0.6], 1, [0.4, 0.5, 0.6], [-2, 0, 2]), "not decided")
        self.assertEqual(torch_exec.verdict([0.4, 0.5], 1, [0.4, 0.5]), "not decided")

    def test_the_training_says_why_it_cannot(self):
        with tempfile.TemporaryDirectory() as folder:  # with a PyTorch that cannot be loaded
            pathlib.Path(folder, "torch.py").write_text("raise ImportError('not this one')\n")
            done = subprocess.run([sys.executable, HERE / "torch_train.py"], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": folder})
        self.assertEqual((done.returncode, done.stderr), (3, "no PyTorch: not this one\n"))
        self.assertNotIn("import gpushare", (HERE / "torch_train.py").read_text())


if __name__ == "__main__":
    unittest.main()
