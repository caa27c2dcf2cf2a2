"""Two numpy jobs share the host device; one has twice the weight of the other, and gets twice the device's time."""
import gpushare

def train(session):
    weights = session.array((256, 256))              # stays until the session is closed
    weights[:] = 1 / 256

    def step(iteration):                             # runs when it is the session's turn
        scratch = iteration.array((256, 256))        # the session is charged until the iteration ends, at no cost
        scratch[:] = weights @ weights

    return [session.submit(step) for _ in range(100)]

with gpushare.Runtime("host", policy="fair") as runtime:
    jobs = [runtime.open_session("resnet", memory="256M", weight=2), runtime.open_session("bert", memory="256M")]
    resnet, bert = (train(job) for job in jobs)
    resnet[-1].result()                              # until here both had work
    ms = [job.info()["service_ns"] / 1e6 for job in jobs]
    for job, spent in zip(jobs, ms):
        print(f"{job.name}: {spent:.0f} ms, {spent / sum(ms):.0%} of the device's time")
