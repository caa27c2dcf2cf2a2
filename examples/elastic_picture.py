#!/usr/bin/env python3
"""Draws the bytes over time that example_elastic writes: elastic_picture.py BYTES.csv PICTURE.svg

SPDX-License-Identifier: Apache-2.0"""
import csv
import sys

WIDTH, HEIGHT, LEFT, TOP = 720, 260, 56, 34
MIB = 1 << 20
STYLE = ("<style>text{fill:#222}.card{fill:#fff}.back{fill:#f4f4f4}"
         "@media(prefers-color-scheme:dark){text{fill:#d6dde6}.card{fill:#191d23}.back{fill:#22272f}}</style>")


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
    out = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {TOP + HEIGHT + 50}" '
           'font-family="sans-serif" font-size="17">',
           STYLE,
           '<rect class="card" width="100%" height="100%" rx="10"/>',
           f'<rect class="back" x="{LEFT}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>',
           f'<polygon points="{area(lambda row: 0, kv)}" fill="#d2691e"/>',
           f'<polygon points="{area(kv, both)}" fill="#4682b4"/>']
    for part in range(5):
        amount = capacity * part / 4
        out.append(f'<text x="{LEFT - 6}" y="{y(amount) + 6:.1f}" text-anchor="end">{amount / MIB:.0f}</text>')
    for ms in range(0, int(end) + 1, 200):
        out.append(f'<text x="{x(ms):.1f}" y="{TOP + HEIGHT + 20}" text-anchor="middle">{ms}</text>')
    out += [f'<text x="{LEFT + WIDTH / 2}" y="{TOP + HEIGHT + 42}" text-anchor="middle">milliseconds</text>',
            f'<text x="{LEFT}" y="22">MiB of the device:</text>',
            f'<rect x="{LEFT + 165}" y="9" width="14" height="14" fill="#d2691e"/><text x="{LEFT + 185}" y="22">KV cache of the server</text>',
            f'<rect x="{LEFT + 405}" y="9" width="14" height="14" fill="#4682b4"/><text x="{LEFT + 425}" y="22">activations of the training</text>',
            "</svg>"]
    with open(target, "w", encoding="utf-8") as file:
        file.write("\n".join(out) + "\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
