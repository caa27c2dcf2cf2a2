"""A small ONNX model answers requests with deadlines on the host device, beside a job that takes what is left.

    pip install onnxruntime onnx
    python examples/python/serve_onnx.py [model.onnx]

Without a file it makes a network that tells whether a point lies in a ring, exactly, by hand-made weights.
"""
# SPDX-License-Identifier: Apache-2.0
import os
import sys
import tempfile

import numpy

import gpushare
import gpushare.onnxruntime


def make_ring(path):
    """x -> x^2 + y^2 -> (inside the outer circle) and (outside the inner one)."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    constants = {"ones": numpy.ones((2, 1), numpy.float32), "inner": numpy.float32([0.25]), "outer": numpy.float32([1.0])}
    nodes = [helper.make_node("Mul", ["point", "point"], ["squares"]), helper.make_node("MatMul", ["squares", "ones"], ["radius"]),
             helper.make_node("Greater", ["radius", "inner"], ["outside"]), helper.make_node("Less", ["radius", "outer"], ["inside"]),
             helper.make_node("And", ["outside", "inside"], ["ring"])]
    graph = helper.make_graph(nodes, "ring", [helper.make_tensor_value_info("point", TensorProto.FLOAT, ["batch", 2])],
                              [helper.make_tensor_value_info("ring", TensorProto.BOOL, ["batch", 1])],
                              [numpy_helper.from_array(value, name) for name, value in constants.items()])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), path)


def main():
    with tempfile.TemporaryDirectory() as folder, gpushare.Runtime("host", policy="fair", capacity_bytes="256M") as runtime:
        path = os.path.join(folder, "ring.onnx") if len(sys.argv) < 2 else sys.argv[1]
        if len(sys.argv) < 2:
            make_ring(path)
        gpushare.onnxruntime.limit_arena("64M")
        model = gpushare.onnxruntime.Model(runtime, path, arena="16M", name="ring", weight=4)
        other = runtime.open_session("training", ephemeral_bytes="8M")
        queue = gpushare.RequestQueue(runtime)
        queue.add_model(model.session, model.run, batch_sizes=[1, 4, 16])
        inputs = model.model.get_inputs()[0]
        shape = [size if isinstance(size, int) else 4 for size in inputs.shape[1:]]
        points = numpy.random.default_rng(1).uniform(-1.2, 1.2, (200, *shape)).astype(numpy.float32)
        training = [other.submit(lambda step: step.array((512, 512)).fill(1)) for _ in range(20)]
        answers = [future.result() for future in [queue.submit(point, deadline=10.0) for point in points]]
        for ticket in training:
            ticket.result()
        print(f"{sum(answer.in_time for answer in answers)} of {len(points)} answers in time")
        print(f"the session holds {model.session.info()['persistent_bytes']} bytes of weights; largest iteration and weights: {model.session.info()['peak_bytes'] >> 20} MiB")
        if len(sys.argv) < 2:
            radius = (points ** 2).sum(axis=1)
            assert [bool(answer.result[0]) for answer in answers] == ((radius > 0.25) & (radius < 1)).tolist()
        queue.close()
        model.close()


if __name__ == "__main__":
    main()
