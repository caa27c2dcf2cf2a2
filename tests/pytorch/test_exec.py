"""Unmodified PyTorch, and PyTorch with gpushare's allocator, under `gpushare exec --memory`: the preload shim holds the limit."""
# SPDX-License-Identifier: Apache-2.0
import os


def under(limit):
    return [os.environ["GPUSHARE_TOOL"], "exec", "--memory", limit, "--fail-closed", "--"]


def test_the_limit_holds_and_pytorch_recovers(run):
    run("""
        free, total = torch.cuda.mem_get_info()
        assert total == 64 << 20, total                       # of a device with 1 GiB
        assert torch.cuda.get_device_properties(0).total_memory == 64 << 20
        kept = torch.zeros(20 << 18, device="cuda")           # 20 MiB
        for again in range(2):
            try:
                torch.empty(60 << 18, device="cuda")
                raise AssertionError
            except torch.OutOfMemoryError as error:
                assert "64.00 MiB" in str(error), error
        assert torch.cuda.memory_reserved() <= 64 << 20
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            copy = kept.clone()
            kept.record_stream(side)
        side.synchronize()
        assert copy.cpu().sum() == 0
        del kept, copy
        gc.collect()
        torch.cuda.empty_cache()
        large = torch.zeros(60 << 18, device="cuda")          # what did not fit beside the others
        graph = torch.cuda.CUDAGraph()
        small = torch.zeros(8, device="cuda")
        del large
        torch.cuda.empty_cache()
        with torch.cuda.graph(graph):
            result = small.clone()
        small.copy_(torch.ones(8))
        graph.replay()
        assert result.cpu().sum() == 8
        """, command=under("64M"))


def test_two_processes_of_a_group_share_the_limit(run):
    run("""
import subprocess, sys, os
kept = torch.zeros(40 << 18, device="cuda")
other = subprocess.run([sys.executable, "-c", '''
import torch
torch.zeros(10 << 18, device="cuda")
try:
    torch.empty(40 << 18, device="cuda")
except torch.OutOfMemoryError:
    print("out of memory")
'''], capture_output=True, text=True)
assert other.stdout == "out of memory\\n", other
""", command=under("64M"))


def test_gpushares_allocator_under_the_shim(run):
    run("""
        import gpushare.torch as gt
        with gt.session("inside") as s:
            assert s.runtime.info()["capacity_bytes"] <= 64 << 20
            kept = torch.zeros(20 << 18, device=s.device)
            try:
                torch.empty(60 << 18, device=s.device)
                raise AssertionError
            except RuntimeError as error:
                assert gt.is_out_of_memory(error)
            with s.iteration():
                torch.zeros(20 << 18, device=s.device)
            assert kept.cpu().sum() == 0
        """, command=under("64M"))
