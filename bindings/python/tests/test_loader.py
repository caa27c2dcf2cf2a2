"""Images, plans, models, the switcher."""
import json
import struct

import numpy as np
import pytest

import gpushare


def write_safetensors(path, tensors):
    header, offset = {}, 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": "F32", "shape": list(tensor.shape), "data_offsets": [offset, offset + tensor.nbytes]}
        offset += tensor.nbytes
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + b"".join(tensor.tobytes() for tensor in tensors.values()))


@pytest.fixture
def tensors():
    return {f"layer.{index}": np.full((256, 16), index + 1, np.float32) for index in range(4)}


def test_a_model_arrives_layer_by_layer(runtime, session, tensors, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", tensors)
    groups = []
    with gpushare.Loader(runtime, limit_bytes="32M") as loader:
        image = loader.open(tmp_path / "model.safetensors", order="names")
        assert [layer["name"] for layer in image.layers()] == list(tensors)
        assert image.find_layer("layer.2") == 2
        with loader.load(session, image, on_group=lambda *group: groups.append(group)) as model:
            sums = []
            with session.iteration() as iteration:
                for index, tensor in enumerate(tensors.values()):
                    model.make_usable(iteration.stream, index, index + 1)
                    iteration.launch(lambda array: sums.append(float(array.sum())), model.array(index, tensor.shape))
                model.mark_end(iteration.stream)
                iteration.stream.synchronize()
            model.wait(timeout=600)
            assert sums == [float(tensor.sum()) for tensor in tensors.values()]
            assert model.info()["layers_arrived"] == 4
        assert groups[-1][2] == 4
        again = loader.open(tmp_path / "model.safetensors", order="names")
        assert loader.info()["hits"] == 1
        again.close()
        with pytest.raises(gpushare.IoError, match="absent"):
            loader.open(tmp_path / "absent.safetensors")
        (tmp_path / "bad.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{no json at all}")
        with pytest.raises(gpushare.MalformedInput):
            loader.open(tmp_path / "bad.safetensors")


def test_a_switcher_runs_members_in_turn(runtime, tensors):
    with gpushare.Loader(runtime) as loader, gpushare.Switcher(loader, keep_bytes=0) as switcher:
        members = [switcher.add(loader.create(name, tensors), name, ephemeral_bytes="1M") for name in ("a", "b")]
        for member in members * 2:
            with switcher.iteration(member, timeout=600) as iteration:
                assert iteration.loaded
                iteration.model.make_usable(iteration.stream, 0, 4)
                iteration.stream.synchronize()
                assert iteration.model.array(3, (256, 16))[0, 0] == 4
        assert switcher.info()["switches"] >= 3
        assert [switcher.member(member)["state"] for member in members] == ["standby", "active"]
        switcher.remove(members[0])
        with pytest.raises(gpushare.NotFound):
            switcher.member(members[0])


def test_plans_are_solved():
    link = {"bytes_per_s": 1_000_000_000, "call_overhead_ns": 10_000, "group_overhead_ns": 5_000}
    ends, makespan = gpushare.solve_plan([10**6] * 8, link, [10**6] * 8)
    assert ends[-1] == 8 and makespan > 8 * 10**6
    with pytest.raises(gpushare.InvalidArgument):
        gpushare.solve_plan([1], link, group_cap_bytes=0, resident_layers=5)


def test_the_heap_and_packing():
    with gpushare.Heap("1M") as heap:
        first = heap.alloc("64K")
        heap.alloc("64K")
        heap.free(first)
        assert heap.info()["live_blocks"] == 1
        with pytest.raises(gpushare.NotFound):
            heap.free(first)
        with pytest.raises(gpushare.DeviceOutOfMemory):
            heap.alloc("2M")
    offsets, arena = gpushare.solve_placement([(0, 2, 1024), (1, 3, 1024), (2, 4, 1024)])
    assert arena == 2048 and offsets[0] != offsets[1]
    assert gpushare.solve_placement([]) == ([], 0)
    assert gpushare.solve_placement([(0, 2, 1024), (1, 3, 1024)], time_limit=0)[1] == 2048
    with pytest.raises(gpushare.InvalidArgument):
        gpushare.solve_placement([(2, 1, 64)])


def test_images_are_shared_by_a_daemon_alone(session, tensors, tmp_path):
    write_safetensors(tmp_path / "model.safetensors", tensors)
    with pytest.raises(gpushare.Unsupported):
        gpushare.SharedImage(session, tmp_path / "model.safetensors")
