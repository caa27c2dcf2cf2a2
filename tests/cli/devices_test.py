#!/usr/bin/env python3
"""gpushare devices. See support.py. SPDX-License-Identifier: Apache-2.0"""

import json

import support
from support import ToolTest


class Devices(ToolTest):
    def test_host_and_sim_are_always_there(self):
        rows = json.loads(self.tool("devices", "--json", "-", code=0).out)["devices"]
        usable = {row["spec"]: row for row in rows if row["usable"]}
        self.assertIn("host", usable)
        self.assertIn("sim", usable)
        for row in rows:
            self.assertEqual(row["usable"], row["status"] == "OK")
            if row["usable"]:
                self.assertGreater(row["total_bytes"], 0)
            else:
                self.assertTrue(row["reason"], row)
        self.assertIn("host", self.tool("devices", code=0).out)

    def test_bad_usage(self):
        self.refused(["devices", "surplus"], "surplus")


if __name__ == "__main__":
    support.main()
