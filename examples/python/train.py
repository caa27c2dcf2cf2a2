"""A training loop that takes whatever part of a device it was given: by GPUSHARE_DEVICE, GPUSHARE_MEMORY and GPUSHARE_WEIGHT.

Without them it has the first GPU, or the host device, for itself.
"""
import os

import gpushare

with gpushare.Runtime() as runtime, runtime.open_session(os.environ.get("HOSTNAME", "train")) as session:
    weights = session.array((256, 256))
    for step in session.iterations(200):  # each waits for its turn
        scratch = step.array((256, 256))  # gone when the iteration ends, at no cost
        if isinstance(scratch, gpushare.DeviceArray):
            continue  # on a GPU: hand it to torch or cupy
        scratch[:] = 1
        weights[:] = scratch @ scratch
    runtime.synchronize()
    info = session.info()
    print(f"{info['iterations_done']} iterations, {info['service_ns'] / 1e6:.0f} ms of device time on {runtime.info()['device']}")
