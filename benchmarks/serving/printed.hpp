// printed.hpp: Orloj's tables C.1 and C.2 as printed (finish rates of 000, appendix C.1).
// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace gpushare::experiments {

struct PrintedCell {
  const char* name;       // as printed
  const char* synthetic;  // our specification of the case
  double slo_x_p99;
  double clipper, nexus, clockwork, orloj;
};

inline constexpr PrintedCell kPrinted[] = {
    {"std-0.5", "bimodal:0.5", 1.5, 0.01, 0.01, 0.44, 0.57},
    {"std-0.5", "bimodal:0.5", 2, 0.01, 0.02, 0.53, 0.76},
    {"std-0.5", "bimodal:0.5", 3, 0.04, 0.05, 0.62, 0.96},
    {"std-0.5", "bimodal:0.5", 4, 0.11, 0.13, 0.61, 0.99},
    {"std-0.5", "bimodal:0.5", 5, 0.20, 0.25, 0.57, 1.00},
    {"std-1", "bimodal:1", 1.5, 0.02, 0.02, 0.46, 0.60},
    {"std-1", "bimodal:1", 2, 0.03, 0.03, 0.53, 0.76},
    {"std-1", "bimodal:1", 3, 0.10, 0.10, 0.55, 0.97},
    {"std-1", "bimodal:1", 4, 0.21, 0.19, 0.53, 0.99},
    {"std-1", "bimodal:1", 5, 0.33, 0.34, 0.56, 1.00},
    {"std-2", "bimodal:2", 1.5, 0.04, 0.03, 0.43, 0.59},
    {"std-2", "bimodal:2", 2, 0.07, 0.05, 0.51, 0.73},
    {"std-2", "bimodal:2", 3, 0.19, 0.13, 0.55, 0.97},
    {"std-2", "bimodal:2", 4, 0.34, 0.30, 0.50, 1.00},
    {"std-2", "bimodal:2", 5, 0.49, 0.54, 0.59, 1.00},
    {"std-2/0.5", "bimodal:2/0.5", 1.5, 0.16, 0.18, 0.52, 0.75},
    {"std-2/0.5", "bimodal:2/0.5", 2, 0.28, 0.32, 0.59, 0.83},
    {"std-2/0.5", "bimodal:2/0.5", 3, 0.61, 0.68, 0.60, 0.98},
    {"std-2/0.5", "bimodal:2/0.5", 4, 0.89, 0.93, 0.59, 0.96},
    {"std-2/0.5", "bimodal:2/0.5", 5, 0.97, 1.00, 0.63, 1.00},
    {"std-0.5/2", "bimodal:0.5/2", 1.5, 0.01, 0.01, 0.38, 0.40},
    {"std-0.5/2", "bimodal:0.5/2", 2, 0.01, 0.02, 0.50, 0.61},
    {"std-0.5/2", "bimodal:0.5/2", 3, 0.04, 0.04, 0.57, 0.90},
    {"std-0.5/2", "bimodal:0.5/2", 4, 0.08, 0.09, 0.66, 0.97},
    {"std-0.5/2", "bimodal:0.5/2", 5, 0.15, 0.17, 0.52, 0.99},
    {"one-modal", "modes:1", 1.5, 0.03, 0.04, 0.48, 0.46},
    {"one-modal", "modes:1", 2, 0.10, 0.13, 0.55, 0.74},
    {"one-modal", "modes:1", 3, 0.45, 0.54, 0.61, 0.98},
    {"one-modal", "modes:1", 4, 0.73, 0.80, 0.58, 1.00},
    {"one-modal", "modes:1", 5, 0.82, 0.91, 0.60, 1.00},
    {"two-modal", "modes:2", 1.5, 0.01, 0.03, 0.45, 0.60},
    {"two-modal", "modes:2", 2, 0.04, 0.03, 0.58, 0.75},
    {"two-modal", "modes:2", 3, 0.13, 0.14, 0.51, 0.97},
    {"two-modal", "modes:2", 4, 0.27, 0.30, 0.56, 1.00},
    {"two-modal", "modes:2", 5, 0.37, 0.44, 0.55, 1.00},
    {"three-modal", "modes:3", 1.5, 0.03, 0.04, 0.45, 0.59},
    {"three-modal", "modes:3", 2, 0.05, 0.05, 0.55, 0.68},
    {"three-modal", "modes:3", 3, 0.10, 0.09, 0.61, 0.97},
    {"three-modal", "modes:3", 4, 0.18, 0.23, 0.60, 0.99},
    {"three-modal", "modes:3", 5, 0.35, 0.42, 0.61, 0.99},
    {"four-modal", "modes:4", 1.5, 0.03, 0.05, 0.46, 0.59},
    {"four-modal", "modes:4", 2, 0.05, 0.07, 0.56, 0.73},
    {"four-modal", "modes:4", 3, 0.08, 0.12, 0.59, 0.94},
    {"four-modal", "modes:4", 4, 0.10, 0.16, 0.60, 0.98},
    {"four-modal", "modes:4", 5, 0.14, 0.19, 0.60, 1.00},
    {"five-modal", "modes:5", 1.5, 0.02, 0.03, 0.47, 0.60},
    {"five-modal", "modes:5", 2, 0.02, 0.03, 0.55, 0.73},
    {"five-modal", "modes:5", 3, 0.03, 0.07, 0.59, 0.94},
    {"five-modal", "modes:5", 4, 0.04, 0.08, 0.57, 0.97},
    {"five-modal", "modes:5", 5, 0.07, 0.08, 0.56, 0.99},
    {"six-modal", "modes:6", 1.5, 0.04, 0.04, 0.46, 0.58},
    {"six-modal", "modes:6", 2, 0.03, 0.05, 0.53, 0.71},
    {"six-modal", "modes:6", 3, 0.06, 0.08, 0.53, 0.92},
    {"six-modal", "modes:6", 4, 0.07, 0.09, 0.51, 0.97},
    {"six-modal", "modes:6", 5, 0.08, 0.11, 0.54, 0.99},
    {"seven-modal", "modes:7", 1.5, 0.03, 0.05, 0.43, 0.59},
    {"seven-modal", "modes:7", 2, 0.04, 0.05, 0.51, 0.73},
    {"seven-modal", "modes:7", 3, 0.08, 0.09, 0.54, 0.93},
    {"seven-modal", "modes:7", 4, 0.10, 0.12, 0.52, 0.98},
    {"seven-modal", "modes:7", 5, 0.12, 0.15, 0.54, 0.99},
    {"eight-modal", "modes:8", 1.5, 0.03, 0.04, 0.33, 0.60},
    {"eight-modal", "modes:8", 2, 0.05, 0.06, 0.49, 0.74},
    {"eight-modal", "modes:8", 3, 0.08, 0.09, 0.43, 0.93},
    {"eight-modal", "modes:8", 4, 0.09, 0.13, 0.52, 0.97},
    {"eight-modal", "modes:8", 5, 0.11, 0.14, 0.50, 0.99},
};

}  // namespace gpushare::experiments
