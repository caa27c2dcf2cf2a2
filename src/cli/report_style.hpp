// report_style.hpp: the style sheet of reports. Lines differ by colour and by dashes.
// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace gpushare::cli {

inline constexpr size_t kReportStyles = 8;  // s0 ... s7; a ninth policy starts again

inline constexpr const char* kReportStyle = R"css(
:root{color-scheme:light dark;--page:#f6f7f9;--card:#fff;--ink:#1a1f27;--soft:#5b6675;--rule:#dfe3e9;--grid:#e8ebf0;--mark:#eef3fd;
--s0:#1f5fd6;--s1:#c2410c;--s2:#047857;--s3:#a21caf;--s4:#57606e;--s5:#b4231f;--s6:#0b7285;--s7:#7a5d00;
--persistent:#3f6fb5;--lanes:#a9c4ea;--busy:#9cc7b4;--live:#1a1f27}
@media(prefers-color-scheme:dark){:root{--page:#111418;--card:#191d23;--ink:#e7ebf1;--soft:#9aa6b5;--rule:#2d343e;--grid:#262c35;--mark:#1c2738;
--s0:#7fabff;--s1:#ff9d5c;--s2:#4fd0a0;--s3:#eb8bf3;--s4:#aab5c4;--s5:#ff8f88;--s6:#5ccbdd;--s7:#dcc15a;
--persistent:#5b8bd4;--lanes:#33517f;--busy:#2f6b55;--live:#e7ebf1}}
*{box-sizing:border-box}
body{margin:0;background:var(--page);color:var(--ink);font:15px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",Arial,sans-serif}
main{max-width:980px;margin:0 auto;padding:32px 20px 48px}
header{margin-bottom:24px}
h1{font-size:26px;line-height:1.2;margin:0 0 6px;letter-spacing:-.01em}
h2{font-size:18px;margin:0 0 4px}
p{margin:0 0 10px}
.soft{color:var(--soft)}
.facts{display:flex;flex-wrap:wrap;gap:6px 8px;margin:12px 0 0;padding:0;list-style:none}
.facts li{border:1px solid var(--rule);background:var(--card);border-radius:999px;padding:2px 11px;font-size:13px}
.facts b{font-weight:600}
section{background:var(--card);border:1px solid var(--rule);border-radius:10px;padding:18px 20px;margin:0 0 18px}
.finding{font-size:16px}
.scroll{overflow-x:auto}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{padding:6px 8px;text-align:right;border-bottom:1px solid var(--rule);white-space:nowrap}
th{font-size:12.5px;color:var(--soft);font-weight:600;vertical-align:bottom;line-height:1.3}
th:first-child,td:first-child,td.text,th.text{text-align:left}
td.text{white-space:normal}
tbody tr:last-child>*{border-bottom:0}
td.best{background:var(--mark);font-weight:650}
tbody th{color:var(--ink);font-size:15px;text-align:left}
.key{display:flex;flex-wrap:wrap;gap:4px 18px;margin:6px 0 4px;padding:0;list-style:none;font-size:13px}
.key li{display:flex;align-items:center;gap:7px}
.key svg{width:30px;height:12px;flex:none}
.swatch{width:16px;height:11px;border-radius:2px;display:inline-block}
.swatch.persistent{background:var(--persistent)}.swatch.lanes{background:var(--lanes)}.swatch.busy{background:var(--busy)}
svg{display:block;width:100%;height:auto;overflow:visible}
svg text{fill:var(--soft);font-size:12px}
svg .inside{fill:var(--ink);font-size:11px;pointer-events:none}
svg .heading{fill:var(--ink);font-size:13px;font-weight:650}
.grid{stroke:var(--grid)}.axis{stroke:var(--soft);stroke-opacity:.55}
.reference{stroke:var(--s5);stroke-dasharray:5 4}
.line{fill:none;stroke-width:2;stroke-linejoin:round}
.s0{stroke:var(--s0)}.s1{stroke:var(--s1);stroke-dasharray:8 3}.s2{stroke:var(--s2);stroke-dasharray:2.5 2.5}.s3{stroke:var(--s3);stroke-dasharray:10 3 2 3}
.s4{stroke:var(--s4);stroke-dasharray:4 4}.s5{stroke:var(--s5);stroke-dasharray:12 4}.s6{stroke:var(--s6);stroke-dasharray:6 2 2 2 2 2}.s7{stroke:var(--s7);stroke-dasharray:1.5 4}
.s100{stroke:var(--live);stroke-width:1.3}
.dot{stroke-width:9;stroke-linecap:round;stroke-dasharray:none}
.persistent{fill:var(--persistent)}.lanes{fill:var(--lanes)}.busy{fill:var(--busy)}
details{margin-top:10px;font-size:14px}
summary{cursor:pointer;color:var(--soft)}
ul.notes{margin:6px 0 0;padding-left:20px}
ul.notes li{margin:4px 0;overflow-wrap:anywhere}
footer{color:var(--soft);font-size:13px}
@media screen and (max-width:700px){main{padding:18px 10px}section{padding:14px 12px;overflow-x:auto}section>svg{min-width:620px}}
@media print{:root{color-scheme:light;--page:#fff;--card:#fff;--ink:#000;--soft:#444;--rule:#ccc;--grid:#e5e5e5;--mark:#eef3fd;
--s0:#1f5fd6;--s1:#c2410c;--s2:#047857;--s3:#a21caf;--s4:#57606e;--s5:#b4231f;--s6:#0b7285;--s7:#7a5d00;
--persistent:#3f6fb5;--lanes:#a9c4ea;--busy:#9cc7b4;--live:#000}
body{font-size:10.5pt;-webkit-print-color-adjust:exact;print-color-adjust:exact}main{max-width:none;padding:0}
section{border:0;padding:0;margin:0 0 14pt;break-inside:avoid}details:not([open]),section.folded:not(:has(details[open])){display:none}
.scroll{overflow:visible}th,td{padding:3pt 4pt;font-size:8.5pt;white-space:normal}tbody th{font-size:8.5pt}th{font-size:7.5pt}}
)css";

}  // namespace gpushare::cli
