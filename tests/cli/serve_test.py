#!/usr/bin/env python3
"""gpushare serve. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json
import re

import support
from support import OPTIONS, ToolTest

HEADER = "arrival_s,application,exec_ms"
TOKENS = "TIMESTAMP,ContextTokens,GeneratedTokens"


class Serve(ToolTest):
    KEYS = ["version", "device", "label", "source", "c0_ms", "c1", "cases"]
    CASE_KEYS = ["case", "slo_x_p99", "load", "policy", "requests", "finished_in_time", "finish_rate", "p50_ms", "p99_ms", "dropped",
                 "decision_us", "finished_late", "goodput_per_s", "mean_batch", "batches", "busy", "predicted_miss_rate", "price_per_s", "batch_sizes"]
    DROPS = ["expired", "hopeless", "rejected", "queue_full", "cancelled"]

    def serve(self, *arguments):
        return json.loads(self.tool("serve", *arguments, "--json", "-", code=0).out)

    def test_json_has_the_promised_keys_and_every_request_ends_once(self):
        found = self.serve("--synthetic", "modes:3", "--limit", 300, "--load", "1,4", "--slo-x-p99", "2,3", "--policy", "edf,gpushare")
        self.assertEqual(list(found), self.KEYS)
        self.assertEqual([(c["load"], c["slo_x_p99"], c["policy"]) for c in found["cases"]],
                         [(load, slo, policy) for load in (1, 4) for slo in (2, 3) for policy in ("edf", "gpushare")])
        for case in found["cases"]:
            self.assertEqual(list(case), self.CASE_KEYS)
            self.assertEqual(sorted(case["dropped"]), sorted(self.DROPS))
            self.assertEqual(case["requests"], 300)
            self.assertEqual(case["finished_in_time"] + case["finished_late"] + sum(case["dropped"].values()), 300)
            self.assertAlmostEqual(case["finish_rate"], case["finished_in_time"] / 300)
            self.assertEqual(sum(int(size) * times for size, times in case["batch_sizes"].items()),
                             300 - sum(case["dropped"].values()))

    def test_requests_served_one_by_one_by_hand(self):
        # Alone a request takes c0 + c1 x 1 x exec = 0.9 x 10 + 0.1 x 10 ms; they come a second apart.
        path = self.file("three.csv", f"{HEADER}\n0,a,10\n1,a,10\n2,b,10\n")
        case = self.serve("--requests", path, "--policy", "fifo", "--slo-x-p99", 2)["cases"][0]
        self.assertIsNone(case["load"])
        self.assertEqual(case["finished_in_time"], 3)
        self.assertAlmostEqual(case["p50_ms"], 10)
        self.assertEqual(case["batch_sizes"], {"1": 3})

    def test_layouts_marks_and_line_ends(self):
        path = self.folder / "marked.csv"
        for text in (f"{HEADER}\n0,\"a, b\",5\n", f"{HEADER},slo_ms\r\n0,a,5,100\r\n", f"{TOKENS}\n2023-11-16 18:15:46.68,10,2\n"):
            with self.subTest(text=text):
                path.write_bytes(b"\xef\xbb\xbf" + text.encode())
                self.assertEqual(self.serve("--requests", path, "--policy", "fifo")["cases"][0]["requests"], 1)

    def test_a_public_trace(self):
        trace = OPTIONS.data / "requests" / "azure_llm_2023_conv.csv"
        if not trace.exists():
            self.skipTest("no shared data")
        case = self.serve("--requests", trace, "--limit", 500, "--policy", "gpushare", "--slo-x-p99", 3)["cases"][0]
        self.assertEqual(case["requests"], 500)

    def test_the_same_seed_gives_the_same(self):
        def result(seed):
            cases = self.serve("--synthetic", "bimodal:1", "--limit", 200, "--seed", seed, "--slo-x-p99", 2)["cases"]
            return [{key: value for key, value in case.items() if key != "decision_us"} for case in cases]
        self.assertEqual(result(7), result(7))
        self.assertNotEqual(result(7), result(8))

    def test_the_report_stands_alone(self):
        self.tool("serve", "--synthetic", "modes:2", "--limit", 100, "--slo-x-p99", "2,3", "--report", "page.html", code=0)
        page = (self.folder / "page.html").read_text()
        self.assertIsNone(re.search(r"<script|<link|<img|https?:|url\(|@import", page))
        self.assertIn("</html>", page)

    def test_policy_settings(self):
        def rate(*settings):
            case = self.serve("--synthetic", "modes:3", "--load", 4, "--limit", 600, "--slo-x-p99", 2, "--policy", "gpushare", *settings)
            return case["cases"][0]
        told = rate()
        self.assertGreater(told["predicted_miss_rate"], 0)
        self.assertLess(told["predicted_miss_rate"], 1)
        self.assertGreater(told["price_per_s"], 0)
        for settings in (["--labels", "off"], ["--max-pending", 3]):
            with self.subTest(settings=settings):
                self.assertLess(rate(*settings)["finish_rate"], told["finish_rate"])
        # The others may win or lose a few requests here; they must take effect.
        for settings in (["--opportunity", 0], ["--warm-samples", 0], ["--warm-from", 20]):
            with self.subTest(settings=settings):
                self.assertNotEqual(rate(*settings)["p50_ms"], told["p50_ms"])
        self.assertEqual(rate("--opportunity", 0)["price_per_s"], 0)
        self.assertGreater(rate("--max-pending", 3)["dropped"]["queue_full"], 0)

    def finding(self, *arguments):
        self.tool("serve", *arguments, "--report", "page.html", code=0)
        return re.search(r'class="finding">([^<]*)', (self.folder / "page.html").read_text()).group(1)

    def test_the_report_names_the_best_policies(self):
        easy = ["--synthetic", "static:10", "--load", 0.01, "--limit", 50, "--slo-x-p99", "4,5", "--policy"]
        self.assertEqual(self.finding(*easy, "clipper,edf"), "All policies finish 100.0% in time in the mean over the deadlines.")
        self.assertEqual(self.finding(*easy, "clipper"), "clipper finishes the most in time in the mean over the deadlines: 100.0%.")
        hard = ["--synthetic", "modes:3", "--load", 4, "--limit", 300, "--policy", "clipper,gpushare,fifo", "--slo-x-p99"]
        self.assertRegex(self.finding(*hard, "2,5"), r"^gpushare finishes the most in time in the mean over the deadlines: \d")
        self.assertRegex(self.finding(*hard, "2"), r"^gpushare finishes the most in time: \d")

    def test_bad_options(self):
        base = ["serve", "--synthetic", "modes:2", "--limit", "10"]
        cases = [
            (["--policy", "edf,lifo"], ["--policy", "'lifo'", "clockwork"]),
            (["--policy", "edf,edf"], ["--policy", "once"]),
            (["--load", "1,nan"], ["--load", "'nan'", "above 0"]),
            (["--load", "1e-300"], ["arrivals", "at most 4e+09 s"]),
            (["--slo-x-p99", "0"], ["--slo-x-p99", "above 0"]),
            (["--c0-x-mean", "-1"], ["--c0-x-mean", "from 0"]),
            (["--c1", "nan"], ["--c1", "above 0"]),
            (["--seed", "-1"], ["--seed", "whole number"]),
            (["--labels", "maybe"], ["--labels", "on and off"]),
            (["--opportunity", "-1"], ["--opportunity"]),
            (["--opportunity", "x"], ["--opportunity"]),
            (["--warm-samples", "-1"], ["--warm-samples"]),
            (["--warm-from", "1.5"], ["--warm-from"]),
            (["--max-pending", "0"], ["max_pending"]),
            (["--burstiness", "11"], ["--burstiness", "at most 10"]),
            (["--decode-ms", "1e300"], ["--decode-ms", "10000"]),
            (["--prefill-ms", "-1"], ["--prefill-ms"]),
            (["--work", "wait"], ["--work", "host"]),
            (["--time-scale", "2"], ["--time-scale", "host"]),
            (["--device", "host", "--time-scale", "0"], ["--time-scale", "above 0"]),
            (["--device", "host", "--work", "fast"], ["--work", "'fast'", "arithmetic and wait"]),
            (["--decode-ms", "5"], ["--decode-ms", "--requests"]),
            (["--prefill-ms", "5"], ["--prefill-ms", "--requests"]),
            (["--requests", "x.csv"], ["--synthetic"]),
            (["--report", "no/folder/r.html"], ["--report", "no/folder"]),
            (["--report", "same", "--json", "same"], ["--report", "--json"]),
        ]
        for arguments, words in cases:
            with self.subTest(arguments=arguments):
                self.refused([*base, *arguments], *words)
        self.refused(["serve", "--synthetic", "modes:2", "--limit", "-5"], "--limit", "whole number from 0")
        self.refused([*base, "--device", "cuda:0"], "--device", "'cuda:0'", "sim and host", code=3)
        self.refused(["serve"], "--requests", "--synthetic")
        self.file("two.csv", f"{HEADER}\n0,a,10\n0,a,10\n")
        self.refused(["serve", "--requests", "two.csv", "--load", "1"], "--load", "two.csv", "at once")
        self.tool("serve", "--requests", "two.csv", "--policy", "fifo", "--slo-x-p99", 2, code=0)
        for option in ("--seed", "--burstiness"):
            self.refused(["serve", "--requests", "two.csv", option, "2"], option, "--synthetic")
        for spec in ("modes:9", "modes:x", "bimodal:-1", "static:0", "nope"):
            self.refused(["serve", "--synthetic", spec], spec, "modes:1 to modes:8")

    def test_request_files_name_file_line_and_column(self):
        self.refused(["serve", "--requests", "missing.csv"], "missing.csv")
        self.refused(["serve", "--requests", "."], "directory")
        cases = [
            (HEADER, "-1,a,5", "arrival_s"), (HEADER, "0,a,nan", "exec_ms"), (HEADER, "0,,5", "application"), (HEADER, "0,a", "2 fields"),
            (HEADER + ",slo_ms", "0,a,5,0", "slo_ms"), (TOKENS, "yesterday,1,1", "TIMESTAMP"),
            (TOKENS, "2023-11-16 18:15:46.68,-1,1", "ContextTokens"), (TOKENS, "2023-11-16 18:15:46.68,1,1e9", "GeneratedTokens"),
        ]
        for header, row, word in cases:
            with self.subTest(row=row):
                self.refused(["serve", "--requests", self.file("bad.csv", f"{header}\n{row}\n")], "bad.csv:2:", word)
        for text in ("", "what,is,this\n", HEADER + "\n"):
            with self.subTest(text=text):
                self.refused(["serve", "--requests", self.file("bad.csv", text)], "bad.csv")


if __name__ == "__main__":
    support.main()
