#!/usr/bin/env python3
"""Draws the bytes over time that example_elastic writes: elastic_picture.py BYTES.csv PICTURE.svg

SPDX-License-Identifier: Apache-2.0"""
import csv
import sys

WIDTH, HEIGHT, LEFT, TOP = 720, 260, 56, 34
MIB = 1 << 20
STYLE = ("<style>text{fill:#222}.back{fill:#f4f4f4}"
         "@media(prefers-color-scheme:dark){text{fill:#d6dde6}.back{fill:#22272f}}</style>")


def main(source, target):
    with open(source, encoding="utf-8") as file:
        rows = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    end, capacity = rows[-1]["ms"], rows[0]["capacity_bytes"]
    x = lambda ms: LEFT + ms / end * WIDTH
    y = lambda amount: TOP + HEIGHT - amount / capacity * HEIGHT

    def area(low, high):
        points = [(x(row["ms"]), y(high(row))) for row in rows] + [(x(row["ms"]), y(low(row))) for row in reversed(rows)]
        return " ".join(f"{px:.1f},{py:.1f}" for px, py in points)

    kv, both = lambda row: row["kv_bytes"], lambda row: row["kv_bytes"] + row["training_bytes"]
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 44}" '
           'font-family="sans-serif" font-size="12">',
           STYLE,
           f'<rect class="back" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
           f'<polygon points="{area(lambda row: 0, kv)}" fill="#d2691e"/>',
           f'<polygon points="{area(kv, both)}" fill="#4682b4"/>']
    for part in range(5):
        amount = capacity * part / 4
        out.append(f'<text x="{LEFT - 6}" y="{y(amount) + 4:.1f}" text-anchor="end">{amount / MIB:.0f}</text>')
    for ms in range(0, int(end) + 1, 200):
        out.append(f'<text x="{x(ms):.1f}" y="{TOP + HEIGHT + 16}" text-anchor="middle">{ms}</text>')
    out += [f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 34}" text-anchor="middle">milliseconds</text>',
            f'<text x="{LEFT}" y="20">MiB of the device:</text>',
            f'<rect x="{LEFT + 120}" y="10" width="12" height="12" fill="#d2691e"/><text x="{LEFT + 138}" y="20">KV cache of the server</text>',
            f'<rect x="{LEFT + 290}" y="10" width="12" height="12" fill="#4682b4"/><text x="{LEFT + 308}" y="20">activations of the training</text>',
            "</svg>"]
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
