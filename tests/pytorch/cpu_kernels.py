"""Kernels for the stand-in for CUDA's runtime, which computes nothing: PyTorch's operators of CUDA tensors run on the CPU, on copies.

    with cpu_kernels.CpuKernels():
        model.to("cuda")(x)

Allocations, views and copies of whole storages stay CUDA's, so that memory, streams and threads of backward are as on a GPU.
"""
# SPDX-License-Identifier: Apache-2.0
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

# They move no data, or a single number.
_NATIVE = {"aten::empty", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided", "aten::detach", "aten::record_stream", "aten::set_",
           "aten::resize_", "aten::_local_scalar_dense", "aten::is_pinned", "aten::_pin_memory"}


def _bytes_of(storage):
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class CpuKernels(TorchDispatchMode):
    def __torch_dispatch__(self, operator, types, arguments=(), keywords=None):
        keywords = keywords or {}
        given = [each for each in tree_flatten((arguments, keywords))[0] if isinstance(each, torch.Tensor) and each.is_cuda]
        device = keywords.get("device")
        device = None if device is None else torch.device(device)
        if (not given and (device is None or device.type != "cuda")) or operator.is_view or operator._schema.name in _NATIVE:
            return operator(*arguments, **keywords)
        return self._on_the_cpu(operator, arguments, dict(keywords), given, device)

    def _on_the_cpu(self, operator, arguments, keywords, given, device):
        storages, twins, originals = {}, {}, {}
        for tensor in given:  # tensors that share a storage do so on the CPU
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in storages:
                storages[key] = (storage, _bytes_of(storage).cpu())
            twin = torch.empty(0, dtype=tensor.dtype).set_(storages[key][1].untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
            twins[id(tensor)], originals[id(twin)] = twin, tensor
        if device is not None:
            keywords["device"] = torch.device("cpu")
        place = lambda each: twins.get(id(each), each) if isinstance(each, torch.Tensor) else each
        results = operator(*tree_map(place, arguments), **tree_map(place, keywords))
        for index, argument in enumerate(operator._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = keywords.get(argument.name) if argument.kwarg_only else arguments[index] if index < len(arguments) else None
                for changed in tree_flatten(value)[0]:
                    if id(changed) in twins:
                        storage, copy = storages[changed.untyped_storage()._cdata]
                        _bytes_of(storage).copy_(copy)
        to_cuda = given[0].device if device is None else device if device.type == "cuda" else None

        def back(each):
            if not isinstance(each, torch.Tensor):
                return each
            if id(each) in originals:
                return originals[id(each)]
            if to_cuda is None or each.is_cuda:
                return each
            whole = each.contiguous()
            return torch.empty(whole.shape, dtype=whole.dtype, device=to_cuda).copy_(whole)

        return tree_map(back, results)
