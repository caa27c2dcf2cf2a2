"""Two numpy jobs share the host device; one has twice the weight of the other."""
import threading

import gpushare

with gpushare.Runtime("host", policy="fair") as runtime:

    def train(name, weight):
        with runtime.open_session(name, weight=weight, memory="256M") as session:
            weights = session.array((256, 256))
            weights[:] = 1
            for step in session.iterations(200):  # each waits for its turn
                scratch = step.array((256, 256))  # gone when the iteration ends, at no cost
                scratch[:] = weights @ weights
            runtime.synchronize()
            print(f"{name}: {session.info()['iterations_done']} iterations, {session.info()['service_ns'] / 1e6:.0f} ms of device time")

    jobs = [threading.Thread(target=train, args=job) for job in (("resnet", 2), ("bert", 1))]
    for job in jobs:
        job.start()
    for job in jobs:
        job.join()
