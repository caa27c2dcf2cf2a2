#!/usr/bin/env python3
"""gpushare plan. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json
import os
import subprocess

import support
from support import OPTIONS, ToolTest


class PlanModel(ToolTest):
    KEYS = ["version", "layers", "groups", "makespan_ms", "lower_bound_ms", "one_shot_ms", "per_layer_ms", "best_uniform_ms", "solve_us",
            "optimal"]
    COSTS = ["--bandwidth-gbs", 12, "--call-overhead-us", 10, "--group-overhead-us", 20]
    MODEL = "examples/models/cnn.csv"

    def plan(self, *arguments, model=None):
        return json.loads(self.tool("plan", "--model", model or self.MODEL, *self.COSTS, *arguments, "--json", "-", code=0).out)

    def check_plan(self, plan, first=0):
        self.assertEqual(list(plan), self.KEYS)
        for group in plan["groups"]:
            self.assertEqual(list(group), ["first", "last", "bytes"])
            self.assertEqual(group["first"], first)
            self.assertGreaterEqual(group["last"], first)
            first = group["last"] + 1
        self.assertEqual(first, plan["layers"])
        for other in ("one_shot_ms", "per_layer_ms", "best_uniform_ms"):
            self.assertLessEqual(plan["makespan_ms"], plan[other] * (1 + 1e-12))
        self.assertLessEqual(plan["lower_bound_ms"], plan["makespan_ms"])

    def test_json_has_the_promised_keys(self):
        plan = self.plan()
        self.assertEqual(plan["layers"], 38)
        self.check_plan(plan)
        self.check_plan(self.plan("--exec-ms", "examples/models/cnn_exec.csv"))

    def test_the_arithmetic_of_two_layers(self):
        # 12 MB and 24 MB over 12 GB/s: 1 and 2 ms; execution 3 and 4 ms. In two groups: arrived 1.01 and 3.02, done 4.03, 8.05.
        model = self.file("two.csv", f"layer,type,megabytes\na,x,{12e6 / 2**20!r}\nb,x,{24e6 / 2**20!r}\n")
        times = self.file("exec.csv", "layer,exec_ms\nb,4\na,3\n")
        plan = self.plan("--exec-ms", times, model=model)
        self.assertEqual(plan["groups"], [{"first": 0, "last": 0, "bytes": 12000000}, {"first": 1, "last": 1, "bytes": 24000000}])
        self.assertAlmostEqual(plan["makespan_ms"], 1.01 + 3.02 + 4.02, places=9)
        self.assertAlmostEqual(plan["one_shot_ms"], 3.01 + 7.02, places=9)
        self.assertAlmostEqual(plan["per_layer_ms"], plan["makespan_ms"], places=9)

    def test_assumed_execution_times_are_said_so(self):
        arguments = ["plan", "--model", self.MODEL, *self.COSTS]
        table = self.tool(*arguments, code=0)
        self.assertIn("assumed, not measured", table.out)
        self.assertEqual(table.err, "")
        self.assertIn("assumed, not measured", self.tool(*arguments, "--json", "-", code=0).err)
        measured = self.tool(*arguments, "--exec-ms", "examples/models/cnn_exec.csv", code=0)
        self.assertNotIn("assumed", measured.out)
        self.assertIn("cnn_exec.csv", measured.out)

    def test_resident_layers_and_cap(self):
        plan = self.plan("--resident", 5)
        self.check_plan(plan, first=5)
        self.assertEqual(self.plan("--resident", 38)["groups"], [])
        capped = self.tool("plan", "--model", self.MODEL, *self.COSTS, "--group-cap", "1MiB", code=0)
        self.assertIn("ignore it", capped.out)
        for group in self.plan("--group-cap", "1MiB")["groups"]:
            self.assertTrue(group["bytes"] <= 2**20 or group["first"] == group["last"])

    def test_timeline_is_the_pipeline(self):
        plan = self.plan("--timeline", "t.json", "--resident", 3)
        trace = json.loads((self.folder / "t.json").read_text())
        events = trace["traceEvents"] if isinstance(trace, dict) else trace
        tracks = {e["tid"]: e["args"]["name"] for e in events if e.get("name") == "thread_name"}
        spans = {"link": [], "lane": []}
        for e in events:
            if e["ph"] == "X":
                spans[tracks[e["tid"]]].append((e["ts"], e["ts"] + e["dur"]))
        self.assertEqual(len(spans["link"]), len(plan["groups"]))
        self.assertEqual(len(spans["lane"]), len(plan["groups"]) + 1)
        for track in spans.values():
            for (_, end), (start, _) in zip(track, track[1:]):
                self.assertGreaterEqual(start, end - 0.002)
        for (_, arrived), (start, _) in zip(spans["link"], spans["lane"][1:]):
            self.assertGreaterEqual(start, arrived - 0.002)
        self.assertAlmostEqual(spans["lane"][-1][1] / 1e3, plan["makespan_ms"], places=4)

    def safetensors(self, name, sizes):
        header, at = {}, 0
        for tensor, size in sizes:
            header[tensor] = {"dtype": "U8", "shape": [size], "data_offsets": [at, at + size]}
            at += size
        text = json.dumps(header).encode()
        path = self.folder / name
        path.write_bytes(len(text).to_bytes(8, "little") + text + bytes(at))
        return path

    def test_safetensors_files_and_sets(self):
        self.safetensors("one.safetensors", [("x", 1000), ("y", 2000)])
        plan = self.plan(model="one.safetensors")
        self.check_plan(plan)
        self.assertEqual(plan["layers"], 2)
        self.assertEqual(sum(g["bytes"] for g in plan["groups"]), 3000)
        self.safetensors("two.safetensors", [("z", 500)])
        self.file("m.safetensors.index.json", json.dumps({"weight_map": {
            "x": "one.safetensors", "y": "one.safetensors", "z": "two.safetensors"}}))
        self.assertEqual(self.plan(model="m.safetensors.index.json")["layers"], 3)
        (self.folder / "one.safetensors").write_bytes(b"\xff" * 20)
        self.refused(["plan", "--model", "one.safetensors", *self.COSTS], "one.safetensors")

    def test_order_and_checksums(self):
        self.safetensors("one.safetensors", [("x", 9), ("y", 2000)])
        order = self.file("order.txt", "# execution order\ny\n\nx\n")
        plan = self.plan("--order", order, "--checksums", "sums", "--group-cap", "1B", model="one.safetensors")
        self.assertEqual([g["bytes"] for g in plan["groups"]], [2000, 9])
        sums = (self.folder / "sums").read_text().splitlines()
        self.assertEqual([line.split()[1] for line in sums], ["x", "y"])
        self.assertEqual(sums[0], "bbe568a3 x")  # CRC-32C of nine zeros
        base = ["plan", "--model", "one.safetensors", *self.COSTS]
        self.refused([*base, "--order", self.file("o.txt", "x\nz\n")], "o.txt:2", "'z'", "no layer")
        self.refused([*base, "--order", self.file("o.txt", "x\nx\n")], "o.txt:2", "once")
        self.refused([*base, "--order", self.file("o.txt", "x\n")], "o.txt", "'y'")
        self.refused([*base, "--order", "nowhere.txt"], "nowhere.txt")
        self.refused([*base, "--checksums", "no/such/folder/s"], "--checksums")
        self.refused(["plan", "--model", self.MODEL, *self.COSTS, "--checksums", "s"], "--checksums", "cnn.csv", "safetensors")

    def test_order_by_names(self):
        self.safetensors("m.safetensors", [("h.0.w", 10), ("h.10.w", 30), ("h.2.w", 20), ("lm_head.w", 40), ("wte.w", 50)])
        cap = ("--group-cap", "1B")
        sizes = [[g["bytes"] for g in self.plan(*cap, *order, model="m.safetensors")["groups"]]
                 for order in ((), ("--order-by", "bytes"), ("--order-by", "names"))]
        self.assertEqual(sizes, [[10, 30, 20, 40, 50], [10, 30, 20, 40, 50], [50, 10, 20, 30, 40]])
        self.refused(["plan", "--model", "m.safetensors", *self.COSTS, "--order-by", "size"], "--order-by", "bytes and names")

    def test_odd_files_are_refused_and_not_waited_for(self):
        os.mkfifo(self.folder / "pipe.safetensors")
        self.refused(["plan", "--model", "pipe.safetensors", *self.COSTS], "pipe.safetensors", "a pipe")
        os.mkdir(self.folder / "folder.safetensors")
        self.refused(["plan", "--model", "folder.safetensors", *self.COSTS], "folder.safetensors", "a folder")
        os.symlink("gone", self.folder / "link.safetensors")
        self.refused(["plan", "--model", "link.safetensors", *self.COSTS], "link.safetensors", "where a link leads")

    def test_a_full_disk_is_told(self):
        self.safetensors("one.safetensors", [("x", 9)])
        for option in ("--json", "--timeline", "--checksums"):
            model = "one.safetensors" if option == "--checksums" else self.MODEL
            outcome = self.tool("plan", "--model", model, *self.COSTS, option, "/dev/full")
            self.assertNotEqual(outcome.code, 0, option)
            self.assertIn("/dev/full", outcome.err)
        with open("/dev/full", "w") as full:
            command = [OPTIONS.tool, "plan", "--model", self.MODEL, *map(str, self.COSTS)]
            outcome = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, cwd=self.folder, check=False)
        self.assertEqual(outcome.returncode, 1)
        self.assertIn("No space left", outcome.stderr)

    def test_tens_of_thousands_of_layers(self):
        model = self.file("model.csv", "layer,type,megabytes\n" + "".join(f"l{i},conv,{0.01 + i % 7 / 50}\n" for i in range(50_000)))
        for overhead, optimal in ((10, True), (0, True), (0.01, False)):
            done = self.tool("plan", "--model", model, "--bandwidth-gbs", 12, "--call-overhead-us", overhead, "--group-overhead-us",
                             overhead, "--json", "-", code=0)
            plan = json.loads(done.out)
            self.assertEqual(plan["optimal"], optimal)
            self.assertLess(plan["makespan_ms"], 1.05 * plan["lower_bound_ms"])

    def test_bad_input_names_what_is_allowed(self):
        base = ["plan", "--model", self.MODEL]
        self.refused(base, "--bandwidth-gbs")
        for option, value in (("--bandwidth-gbs", "0"), ("--call-overhead-us", "-1"), ("--group-overhead-us", "x")):
            costs = dict(zip(self.COSTS[::2], self.COSTS[1::2]))
            costs[option] = value
            self.refused([*base, *(f"{k}={v}" for k, v in costs.items())], option, "give a number")
        self.refused([*base, *self.COSTS, "--resident", "39"], "--resident", "from 0 to 38")
        self.refused([*base, *self.COSTS, "--group-cap", "0"], "--group-cap")
        self.refused(["plan", "--model", "nowhere.csv", *self.COSTS], "nowhere.csv")
        self.refused(["plan", "--model", self.file("m.csv", "layer,type,megabytes\n0,x,-3\n"), *self.COSTS],
                     "m.csv:2", "megabytes", "'-3'", "from 0")
        self.refused([*base, *self.COSTS, "--exec-ms", self.file("e.csv", "layer,exec_ms\nconv1,1\nconv9,1\n")],
                     "e.csv:3", "layer", "'conv9'")
        self.refused([*base, *self.COSTS, "--timeline", "no/such/folder/t.json"], "--timeline")


if __name__ == "__main__":
    support.main()
