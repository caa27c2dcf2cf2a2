#!/usr/bin/env python3
"""gpushare cluster. See support.py. SPDX-License-Identifier: Apache-2.0"""

import html
import json
import re
import subprocess

import support
from support import OPTIONS, ToolTest


class Cluster(ToolTest):
    def examples(self):
        found = sorted((OPTIONS.source / "examples" / "cluster").glob("*.json"))
        self.assertTrue(found)
        return found

    def plan(self, path, *arguments):
        return json.loads(self.tool("cluster", "plan", path, *arguments, "--json", "-", code=0).out)

    def test_every_example_is_decided_and_shown(self):
        for path in self.examples():
            with self.subTest(path=path.name):
                result = self.plan(path)
                self.assertEqual(result["version"], 1)
                self.assertEqual(result["kind"], json.loads(path.read_text())["kind"])
                self.assertTrue(result["results"])
                for entry in result["results"]:
                    self.assertIn("solve_ms", entry)
                    self.assertTrue("scheduler" in entry or "objective" in entry)
                self.assertIn("solve_ms", self.tool("cluster", "plan", path, code=0).out)

    def test_json_goes_to_a_file_beside_the_table(self):
        outcome = self.tool("cluster", "plan", "examples/cluster/services.json", "--json", "out.json", code=0)
        self.assertIn("goodput_rps", outcome.out)
        self.assertEqual(json.loads((self.folder / "out.json").read_text())["kind"], "services")

    def test_the_page_of_fields_is_what_the_readers_say(self):
        result = subprocess.run([OPTIONS.source / "scripts" / "cluster-fields", OPTIONS.tool, "--check"], capture_output=True, text=True, check=False)
        self.assertEqual(result.returncode, 0, result.stderr)

    def test_bad_documents_and_usage(self):
        self.refused(["cluster"], "gpushare cluster")
        self.refused(["cluster", "plan"], "FILE")
        self.refused(["cluster", "plan", "nowhere.json"], "nowhere.json")
        self.refused(["cluster", "plan", self.file("a.json", '{"version": 1, "kind": "services", "devices": -1}')], "a.json: devices: -1")
        self.refused(["cluster", "plan", self.file("b.json", '{"version": 1, "devices": NaN}')], "b.json: devices: not JSON")
        self.refused(["cluster", "plan", "examples/cluster/services.json", "--scheduler", "x"], "--scheduler: 'x' is not allowed")
        self.refused(["cluster", "plan", "examples/cluster/services.json", "--scheduler", ""], "''")
        self.refused(["cluster", "plan", "examples/cluster/services.json", "--objective", "sw"], "--objective")
        self.refused(["cluster", "plan", "examples/cluster/services.json", "--json", "examples/cluster/services.json"], "--json")

    def run_document(self, path, *arguments):
        return json.loads(self.tool("cluster", "run", path, *arguments, "--json", "-", code=0).out)

    def check_colours(self, page):
        """Each stretch of the picture has the colour that the key gives its name."""
        key = dict((html.unescape(name), colour) for colour, name in re.findall(r'<li><span class="swatch" style="background:var\((--s\d)\);opacity:.55"></span>(.*?)</li>', page))
        self.assertEqual(len(set(key.values())), len(key), key)
        others = [name for name in key if name.endswith("others, with no more time each")]
        stretches = re.findall(r'<rect [^>]*fill="var\((--s\d)\)"[^>]*><title>([^<]*), [-+.\de]+ to [-+.\de]+ s</title>', page)
        self.assertEqual(len(stretches), page.count("<rect "))
        missing = set()
        for colour, name in stretches:
            name = html.unescape(name)
            if name not in key:
                missing.add(name)
            self.assertEqual(colour, key[name if name in key else others[0]])
        if others:
            self.assertEqual((len(key), key[others[0]]), (8, "--s4"))
        self.assertEqual(len(missing), int(others[0].split()[0]) if others else 0)

    def test_every_example_is_played_with_report_and_timeline(self):
        for path in self.examples():
            with self.subTest(path=path.name):
                result = self.run_document(path, "--seed", "3", "--noise", "0.1", "--report", "out.html", "--timeline", "out.json")
                self.assertEqual(result["seed"], 3)
                self.assertTrue(result["results"])
                page = (self.folder / "out.html").read_text()
                self.assertIn("Schedulers side by side", page)
                self.assertNotIn("http", page.replace("http://www.w3.org", ""))  # needs nothing else
                self.assertIn("section.folded:not(:has(details[open])){display:none}", page)  # in print, a heading goes with its folded tables
                for attributes, inner in re.findall(r"<section([^>]*)>(.*?)</section>", page, re.S):
                    alone = not re.sub(r"<h2[^>]*>.*?</h2>|<details>.*?</details>", "", inner, flags=re.S)
                    self.assertEqual("folded" in attributes, alone, inner[:80])
                if result["kind"] != "mix":
                    self.assertIn("What ran where", page)
                self.check_colours(page)
                self.assertTrue(json.loads((self.folder / "out.json").read_text()))
                self.assertIn("solve_ms", self.tool("cluster", "run", path, code=0).out)
                again = self.run_document(path, "--seed", "3", "--noise", "0.1")
                for one, other in zip(result["results"], again["results"]):
                    for entry in (one, other):
                        entry.pop("solve_ms"), entry.pop("decision_p99_ms", None)
                        for part in entry.get("parts", {}).values():
                            part.pop("decision_p99_ms", None)
                    self.assertEqual(one, other)

    def test_shares_are_played_by_every_scheduler_for_every_objective(self):
        names = "gpushare,cilantro,cilantro-kernel,cilantro-surface,oracle,fair,evolutionary,greedy,ernest,quasar,minerva,parties,miad"
        for objective in ("sw", "ew", "njc"):
            result = self.run_document("examples/cluster/shares.json", "--scheduler", names, "--objective", objective, "--rounds", "12")
            self.assertEqual([entry["scheduler"] for entry in result["results"]], names.split(","))
            for entry in result["results"]:
                self.assertEqual((entry["objective"], entry["rounds"], len(entry["series"])), (objective, 12, 12))

    def test_an_application_is_planned_and_played_by_every_scheduler(self):
        path = OPTIONS.source / "examples" / "cluster" / "application.json"
        document = json.loads(path.read_text())
        planned = {entry["scheduler"]: entry for entry in self.plan(path)["results"]}
        self.assertEqual(set(planned), {"gpushare", "proportional", "fair"})
        for entry in planned.values():
            self.assertEqual(sum(entry["allocation"].values()), document["capacity"])
        self.assertLess(planned["gpushare"]["p99_ms"], planned["fair"]["p99_ms"])
        names = ["gpushare", "cilantro", "oracle", "fair", "proportional", "evolutionary", "epsilon-greedy"]
        result = self.run_document(path, "--rounds", "12", "--noise", "0")
        self.assertEqual([entry["scheduler"] for entry in result["results"]], names)
        for entry in result["results"]:
            self.assertEqual((entry["rounds"], len(entry["series"]), sum(entry["allocation"].values())), (12, 12, document["capacity"]))
            self.assertEqual("p99_error" in entry, entry["scheduler"] == "gpushare")
        document["requests"][1]["calls"][0]["service"] = "nowhere"
        self.refused(["cluster", "run", self.file("a.json", json.dumps(document))], "a.json: requests[1].calls[0].service: \"nowhere\"")
        self.refused(["cluster", "run", path, "--objective", "sw"], "--objective")
        self.refused(["cluster", "run", path, "--device", "host"], "--device")

    def test_training_jobs_run_on_host_devices(self):
        job = {"iterations": 12, "iteration_ms": 3, "persistent_mb": 4, "ephemeral_mb": 4, "demand": 0.4}
        jobs = [dict(job, name=f"j{i}", config="AB"[i % 2], arrival_s=0.01 * i, **{"class": ("guaranteed", "opportunistic")[i % 2]},
                     gang=2 if i == 3 else 1) for i in range(6)]
        path = self.file("host.json", json.dumps({"version": 1, "kind": "training", "devices": [
            {"id": "a", "memory_bytes": 2 ** 30}, {"id": "b", "memory_bytes": 2 ** 30, "speed": 2}], "jobs": jobs}))
        names = "fifo,srtf,tiresias,antman,iadeep,pack,gpushare"
        result = self.run_document(path, "--device", "host", "--scheduler", names, "--tell", "nothing", "--report", "out.html", "--timeline", "out.json")
        self.assertEqual(result["device"], "host")
        self.assertTrue(any("real work" in note for note in result["notes"]))
        self.assertTrue(any("memory" in note for note in result["notes"]))
        for row in result["results"]:
            self.assertEqual((row["jobs"], row["completed"], row["oom"]), (6, 6, 0), row)
            self.assertGreater(row["makespan_s"], 0)
        self.assertIn("What ran where", (self.folder / "out.html").read_text())
        self.refused(["cluster", "run", path, "--device", "host", "--noise", "0.1"], "--noise")
        self.refused(["cluster", "run", path, "--device", "cuda"], "--device: 'cuda'")
        self.refused(["cluster", "run", path, "--tell", "nothing"], "--tell")
        self.refused(["cluster", "run", path, "--device", "host", "--tell", "all"], "--tell: 'all'")
        self.refused(["cluster", "run", "examples/cluster/retraining.json", "--device", "host"], "--device")

    def test_trials_really_run_on_host_devices(self):
        trials = [{"name": "long", "budget_s": 0.2, "alpha": 1, "work": {"iteration_ms": 2}},
                  {"name": "short", "budget_s": 0.02, "alpha": 1, "work": {"iteration_ms": 2, "demand": 0.5}}]
        path = self.file("trials.json", json.dumps({"version": 1, "kind": "trials", "devices": 3, "max_packed": 2, "max_workers": 2, "groups": [
            {"arrival_s": 0.01, "trials": [{"name": "late", "budget_s": 0.01}, {"name": "huge", "budget_s": 1, "memory_bytes": 1 << 49}]},
            {"arrival_s": 0, "trials": trials}]}))
        names = ["fifo", "static-fluid", "dynamic-fluid", "gpushare"]
        result = self.run_document(path, "--device", "host", "--scheduler", ",".join(names), "--report", "out.html", "--timeline", "out.json")
        self.assertEqual(result["device"], "host")
        self.assertEqual([entry["scheduler"] for entry in result["results"]], names)
        for entry in result["results"]:
            self.assertNotIn("bound_s", entry)
            self.assertGreater(entry["makespan_s"], 0)
            self.assertEqual([one["trial"] for one in entry["rejected"]], ["huge"])
            if entry["scheduler"] != "gpushare":  # whose width depends on when the second group comes
                self.assertEqual(entry["shares"]["long"], 1 if entry["scheduler"] == "fifo" else 2)

    def test_trials_on_devices_of_two_speeds_that_fail_and_come_back(self):
        names = ["fifo", "static-fluid", "dynamic-fluid", "gpushare"]
        trials = [{"name": f"t{i}", "budget_s": 0.2 + 0.1 * i, "alpha": 1.2, "beta": 1.05, "work": {"iteration_ms": 2}} for i in range(4)]
        down = [{"from_s": 0.1, "until_s": 0.5}]
        path = self.file("failing.json", json.dumps({"version": 1, "kind": "trials", "max_packed": 2, "max_workers": 2, "devices": [
            {"id": "fast", "memory_bytes": 1 << 30, "down": down}, {"id": "slow", "memory_bytes": 1 << 30, "speed": 0.5, "down": down}],
            "groups": [{"arrival_s": 0, "trials": trials}]}))
        for device in ("sim", "host"):
            result = self.run_document(path, "--device", device, "--scheduler", ",".join(names))
            self.assertEqual([entry["scheduler"] for entry in result["results"]], names)
            for entry in result["results"]:
                self.assertEqual(sorted(entry["shares"]), [f"t{i}" for i in range(4)], entry)
                self.assertNotIn("rejected", entry)
                self.assertNotIn("not_completed", entry)
                self.assertGreater(entry["makespan_s"], 0.5)  # nothing is up from 0.1 to 0.5, and there is work for longer

    def test_shares_of_jobs_that_really_run_on_the_host_device(self):
        jobs = [{"name": "search", "load": 50, "slo": 0.95, "utility": "linear", "work": {"iteration_ms": 1, "deadline_ms": 1000}},
                {"name": "train", "load": 1, "slo": 1000, "utility": "sqrt", "work": {"iteration_ms": 0.5}}]
        document = {"version": 1, "kind": "shares", "capacity": 20, "max_step": 4, "run": {"rounds": 8, "round_s": 0.02}, "jobs": jobs}
        path = self.file("real.json", json.dumps(document))
        result = self.run_document(path, "--device", "host", "--objective", "ew", "--report", "out.html", "--timeline", "out.json")
        self.assertEqual(result["device"], "host")
        self.assertEqual([entry["scheduler"] for entry in result["results"]], ["gpushare", "cilantro", "fair"])
        for entry in result["results"]:
            self.assertEqual((entry["rounds"], len(entry["series"])), (8, 8))
            self.assertLessEqual(sum(entry["allocation"].values()), 20)
            self.assertEqual(list(entry["utilities"]), ["search", "train"])
            self.assertAlmostEqual(entry["egalitarian"], min(entry["utilities"].values()))
            self.assertNotIn("useful", entry)
        self.assertIn("What ran where", (self.folder / "out.html").read_text())
        events = json.loads((self.folder / "out.json").read_text())
        events = events["traceEvents"] if isinstance(events, dict) else events
        self.assertAlmostEqual(max(event["ts"] + event["dur"] for event in events if event["ph"] == "X"), 8 * 0.02 * 1e6, delta=1)
        self.refused(["cluster", "run", path, "--device", "host", "--scheduler", "oracle"], "nobody knows the curves")
        self.refused(["cluster", "run", path], "jobs[0] ('search'): 'work' is for")
        self.refused(["cluster", "plan", path], "jobs[0] ('search'): 'work' is for")
        self.refused(["cluster", "run", path, "--device", "host", "--noise", "0.1"], "--noise")
        self.refused(["cluster", "run", path, "--device", "host", "--tell", "nothing"], "--tell")
        self.refused(["cluster", "run", "examples/cluster/shares.json", "--device", "host"], "jobs[0] ('search'): on host")
        jobs[0]["curve"] = [[1, 1]]
        self.refused(["cluster", "run", self.file("both.json", json.dumps(document)), "--device", "host"], "curve")

    def test_bad_usage_of_run(self):
        shares, trials = "examples/cluster/shares.json", "examples/cluster/trials.json"
        self.refused(["cluster", "run"], "a document, or a job file")
        self.refused(["cluster", "run", shares, "--scheduler", "antman"], "--scheduler: 'antman' is not allowed")
        self.refused(["cluster", "run", shares, "--objective", "most"], "--objective: 'most'")
        self.refused(["cluster", "run", trials, "--objective", "sw"], "--objective")
        self.refused(["cluster", "run", trials, "--noise", "11"], "--noise")
        self.refused(["cluster", "run", trials, "--restart-s", "1"], "--restart-s")
        self.refused(["cluster", "run", trials, "--guaranteed", "0.5"], "--guaranteed")
        self.refused(["cluster", "run", shares, "--rounds", "0"], "--rounds")
        self.refused(["cluster", "run", "examples/cluster/training.json", "--rounds", "3"], "--rounds")
        self.refused(["cluster", "run", trials, "--report", trials], "--report")
        self.refused(["cluster", "run", self.file("bad.json", '{"version": 1, "kind": "mix", "devices": 2}')], "bad.json: the document: give at least one of")

    def test_a_name_doubled_among_many_is_told(self):
        one = '{"name": "%d", "rate_rps": 1, "slo_ms": 1},'
        text = "".join(one % i for i in range(20000)) + '{"name": "7", "rate_rps": 1, "slo_ms": 1}'
        self.refused(["cluster", "plan", self.file("many.json", '{"version": 1, "kind": "services", "devices": 1, "services": [%s]}' % text)],
                     'services[20000].name: "7" is not allowed; element 7 has that name already')
        self.assertTrue(re.search(r"Usage: gpushare cluster plan FILE.json", self.tool("cluster", "plan", "--help", code=0).out))


if __name__ == "__main__":
    support.main()
