#!/usr/bin/env python3
"""gpushare run --report: the page. See support.py. SPDX-License-Identifier: Apache-2.0"""

import html.parser
import re

import support
from support import ToolTest


class PageParser(html.parser.HTMLParser):
    VOID = {"meta", "br", "link", "img", "input", "hr"}

    def __init__(self):
        super().__init__()
        self.open, self.ids, self.attributes, self.tags, self.problems = [], [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += [(tag, key, value) for key, value in attrs]
        self.ids += [value for key, value in attrs if key == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open[-1] != tag:
            self.problems.append(f"</{tag}> closes {self.open[-3:]}")
        else:
            self.open.pop()


class Report(ToolTest):
    def test_page(self):
        self.tool("run", "--jobs", "examples/jobs/mixed.csv", "--report", "r.html", code=0)
        page = (self.folder / "r.html").read_text()
        parser = PageParser()
        parser.feed(page)
        self.assertEqual(parser.problems, [])
        self.assertEqual(parser.open, [])
        self.assertEqual(len(parser.ids), len(set(parser.ids)))
        for forbidden in ("script", "link", "img", "iframe", "object"):
            self.assertNotIn(forbidden, parser.tags)
        for _, key, value in parser.attributes:
            self.assertNotIn(key, ("src", "href", "xlink:href"))
            self.assertFalse(key.startswith("on"), key)
        for outside in ("http:", "https:", "url(", "@import"):
            self.assertNotIn(outside, page)
        self.assertEqual(parser.tags.count("svg"), sum(1 for t, k, v in parser.attributes
                                                       if t == "svg" and (k, v) in (("role", "img"), ("aria-hidden", "true"))))
        self.assertIn(("html", "lang", "en"), parser.attributes)
        self.assertIn("prefers-color-scheme:dark", page)
        self.assertNotIn("nan", re.sub(r"<style>.*?</style>", "", page, flags=re.S))


if __name__ == "__main__":
    support.main()
