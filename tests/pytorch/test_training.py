"""Training as users of PyTorch, accelerate, transformers and Lightning write it: steps that fail, memory that ends, loops that stay as they are."""
# SPDX-License-Identifier: Apache-2.0
import importlib.util
import pathlib

import pytest


def needs(*modules):
    """The libraries are not among what scripts/test-pytorch must install."""
    missing = [module for module in modules if importlib.util.find_spec(module) is None]
    return pytest.mark.skipif(bool(missing), reason=f"not installed: {', '.join(missing)}")


def test_tensors_of_a_failed_step_keep_their_memory(run):
    """In the exception's traceback, in a variable, in a graph of autograd, in a queue's exception: others allocate meanwhile."""
    run("""
import gpushare.torch as gt
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return g
def step(how, kept):
    x = torch.full((4,), 1.0).to("cuda")
    if how == "autograd":
        x = Copy.apply(x.requires_grad_())
    kept.append(None if how == "traceback" else x)
    raise ValueError("a step of job a fails")
for how in ("variable", "traceback", "autograd"):
    made = []
    try:
        with gt.session("a", memory="64M") as a, a.iteration():
            step(how, made)
    except ValueError as error:
        kept = error
    x = made[0]
    if how != "traceback":
        kept = None
    with gt.session("b", memory="64M") as b, b.iteration():
        others = [torch.full((4,), 2.0).to(b.device) for _ in range(50)]
    theirs = kept.__traceback__.tb_next.tb_frame.f_locals["x"] if how == "traceback" else x
    assert theirs.cpu().tolist() == [1.0] * 4
    if how == "autograd":
        assert theirs.grad_fn.saved_tensors[0].cpu().tolist() == [1.0] * 4
    runtime = a.runtime
    assert runtime.info()["sessions_resident"] == 2       # b has tensors, too
    del kept, theirs, others, made, x
    gc.collect()
    assert runtime.info()["sessions_resident"] == 0, how

class M(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.w = torch.nn.Parameter(torch.zeros(1))
        self.fails = True
    def forward(self, x):
        if self.fails:
            raise ValueError("bad input")
        return x.clone()

def tensor_of(error):
    frame = error.__cause__.__traceback__
    while frame.tb_next:
        frame = frame.tb_next
    return frame.tb_frame.f_locals["x"]

with gt.session("sv", memory="64M") as s:
    model = M().to(s.device).eval()
    with gt.serve(model) as server:
        try:
            server(torch.full((4,), 1.0))
            raise AssertionError
        except gpushare.CallbackFailed as error:
            kept = error
        model.fails = False
        for value in (2.0, 3.0):
            assert server(torch.full((4,), value)).tolist() == [value] * 4
        assert tensor_of(kept).cpu().tolist() == [[1.0] * 4]
        del kept
""")


def test_a_session_goes_on_after_an_exception(run):
    run("""
import gpushare.torch as gt
with gt.session("a", memory="64M") as s, gt.session("strict", memory="64M", fail_on_error=True) as strict:
    for session in (s, strict):
        weights = torch.full((1000,), 7.0).to(session.device)
        for again in range(3):
            try:
                with session.iteration():
                    scratch = torch.empty(1 << 20, device=session.device)
                    raise KeyError("x")
            except KeyError:
                pass
            except gpushare.InvalidState as error:
                assert session is strict and again > 0 and "KeyError" in str(error)
        scratch = None
        gc.collect()
        assert weights.cpu().sum() == 7000 and session.memory()["current_bytes"] < 1 << 20
    with s.iteration():
        pass
""")


def test_out_of_memory_is_pytorchs(run):
    run("""
import gpushare.torch as gt
s = gt.session("small", memory="64M")
try:
    torch.empty(4, device="cuda")
    raise AssertionError
except RuntimeError as error:
    assert not isinstance(error, torch.OutOfMemoryError) and not gt.is_out_of_memory(error)
    assert "no session" in str(error) and "gt.session" in str(error), error
with s:
    for inside in (False, True, False):
        try:
            if inside:
                with s.iteration():
                    torch.empty(1 << 28, device=s.device)
            torch.empty(1 << 28, device=s.device)
            raise AssertionError
        except torch.OutOfMemoryError as error:
            assert gt.is_out_of_memory(error) and len(error.args) == 1
            assert str(error).startswith("CUDA out of memory. Tried to allocate 1.00 GiB.") and "'small'" in str(error), error
    class Grows(torch.autograd.Function):                 # on a thread of autograd
        @staticmethod
        def forward(ctx, x):
            return x.clone()
        @staticmethod
        def backward(ctx, g):
            return torch.empty(floats, device=g.device)
    w = torch.zeros(4, device=s.device, requires_grad=True)
    floats = 1 << 28
    try:
        Grows.apply(w).backward(torch.zeros_like(w))
        raise AssertionError
    except torch.OutOfMemoryError:
        pass
    floats = 4                                            # it goes on, and that thread is done with the error before the process ends
    Grows.apply(w).backward(torch.zeros_like(w))
""")


@needs("accelerate")
def test_accelerate_finds_a_batch_size_that_fits(run):
    run("""
import gpushare.torch as gt
from accelerate.utils import find_executable_batch_size
with gt.session("fits", memory="64M") as s:
    tried = []
    @find_executable_batch_size(starting_batch_size=64)
    def train(batch_size):
        tried.append(batch_size)
        with s.iteration():
            activations = [torch.empty(batch_size << 18, device=s.device) for _ in range(3)]
    train()
    assert tried[0] == 64 and len(tried) > 2 and tried[-1] * 3 <= 64, tried
    assert s.memory()["current_bytes"] == 0, s.memory()
""")


LOOP = """
import gpushare.torch as gt
from torch import nn
torch.manual_seed(3)
torch.set_num_threads(1)

def turns(s):
    s.runtime.synchronize()
    return s.info()["iterations_done"]

class Data(torch.utils.data.Dataset):
    def __init__(self, session=None):
        self.session = session
    def __len__(self):
        return 12
    def __getitem__(self, index):
        assert self.session is None or self.session._open is None      # others may run while data are loaded
        return torch.full((4,), float(index)), torch.tensor(index % 2)

def batches(session):
    return torch.utils.data.DataLoader(Data(session), batch_size=4)

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
loss_of = nn.CrossEntropyLoss()
"""


def test_loops_that_stay_as_they_are(run):
    run(LOOP + """
with gt.session("loop", device="host") as s:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gt.attach(optimizer)
    assert s._open is None
    for x, y in batches(s):
        optimizer.zero_grad()
        loss = loss_of(model(x), y)
        assert s._open is not None
        loss.backward()
        optimizer.step()
        assert s._open is None
    assert turns(s) == 3
    # validation: a turn for each batch
    model.eval()
    with torch.no_grad():
        for x, y in batches(s):
            model(x)
            assert s._open is None
    model.train()
    assert turns(s) == 6
    # gradient accumulation: the turn goes on while the next part is loaded
    for number, (x, y) in enumerate(batches(s)):
        loss_of(model(x), y).backward()
        if number == 2:
            optimizer.step()
    assert turns(s) == 9 and s._open is None
    # a step that fails, and one whose exception the loop catches
    for x, y in batches(s):
        try:
            out = model(x)
            raise ValueError
        except ValueError:
            pass
        model(x).sum().backward()
        optimizer.step()
    assert turns(s) == 12
    # no step at all: what is begun ends with the next batch
    for x, y in batches(s):
        model(x)
    assert s._open is None
    import copy, io
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    before = turns(s)
    with torch.no_grad():
        for other in (copy.deepcopy(model), torch.load(file, weights_only=False)):
            assert torch.equal(other(x), model(x))
    assert turns(s) == before + 3 and s._open is None    # the deep copy's, and twice the model's
assert s.closed and not model._forward_pre_hooks and not model._forward_hooks

with gt.session("closure", device="host") as s:
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    gt.attach(optimizer)
    for x, y in batches(s):
        def closure():
            optimizer.zero_grad()
            loss = loss_of(model(x), y)
            loss.backward()
            return loss
        optimizer.step(closure)
    assert turns(s) == 3

with gt.session("amp", device="host") as s:
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu")
    gt.attach(optimizer)
    for number, (x, y) in enumerate(batches(s)):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(model(x), y)
        if number == 1:
            loss = loss * float("inf")                # the scaler skips this step
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    assert turns(s) >= 2 and s._open is None

with gt.session("gan", device="host") as s:
    maker, judge = nn.Linear(4, 4), nn.Linear(4, 1)
    of_maker, of_judge = (torch.optim.Adam(network.parameters()) for network in (maker, judge))
    gt.attach(of_maker, of_judge)
    for x, _ in batches(s):
        for _ in range(2):
            of_judge.zero_grad(); (judge(x) - judge(maker(x).detach())).mean().backward(); of_judge.step()
        of_maker.zero_grad(); (-judge(maker(x))).mean().backward(); of_maker.step()
    assert turns(s) == 9 and s._open is None
""", cuda=False)


def test_a_turn_is_held_only_while_a_step_may_come(run):
    run(LOOP + """
class Careless(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.error = nn.Linear(4, 2), None
    def forward(self, x):
        y = self.inner(x)
        if self.error:
            raise self.error
        return y.argmax(1) if x.shape[0] == 1 else {"logits": [y], "count": 3} if x.shape[0] == 2 else y
class Opaque(nn.Linear):
    def forward(self, x):
        result = Holder()
        result.logits = super().forward(x)
        return result
class Holder:
    pass
with gt.session("careless", device="host") as s:
    model, opaque = Careless(), Opaque(4, 2)
    optimizer = torch.optim.SGD([*model.parameters(), *opaque.parameters()], lr=0.1)
    gt.attach(optimizer)
    x = torch.rand(4, 4)
    model(x)                                              # nobody wants the result
    assert s._open is None
    out = model(x)
    other = model(x[:2])
    assert s._open is not None
    del out
    assert s._open is not None                            # one of two
    del other
    assert s._open is None
    assert model(x[:1]).shape == (1,) and s._open is None # needs no gradients
    for error in (ValueError("x"), torch.OutOfMemoryError("x")):
        model.error = error
        try:
            model(x)
            raise AssertionError
        except type(error):
            assert s._open is None
            model.error = None
            out = model(x)                                # a second try while the first error is handled
            assert s._open is not None
        out.sum().backward()
        del out
        assert s._open is not None                        # the step comes
        optimizer.step()
        assert s._open is None
    loss_of(model(x), torch.tensor([0, 1, 0, 1])).backward()
    assert s._open is not None
    optimizer.step()
    held = opaque(x)
    del held
    assert s._open is not None                            # what it holds is not looked into
    optimizer.step()
    assert s._open is None
    # an interrupted call leaves no trace
    model.error = KeyboardInterrupt()
    try:
        model(x)
    except KeyboardInterrupt:
        model.error = None
    for batch, _ in batches(s):
        assert s._open is None
        out = model(batch)
        assert s._open is not None
        out.sum().backward()
        optimizer.step()
    # iterations of the program's own are its own
    before = turns(s)
    with s.iteration():
        model(x)
        model.error = ValueError()
        try:
            model(x)
        except ValueError:
            model.error = None
        assert s._open is not None
    assert turns(s) == before + 1

# The loop's thread is the first that calls the model.
with gt.session("elsewhere", device="host") as s:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gt.attach(optimizer)
    seen = []
    def loop():
        for x, y in batches(s):
            loss = loss_of(model(x), y)
            seen.append(s._open is not None)
            loss.backward()
            optimizer.step()
    thread = threading.Thread(target=loop)
    thread.start(); thread.join()
    assert seen == [True] * 3 and turns(s) == 3
""", cuda=False)


@needs("IPython")
def test_a_notebooks_turn_ends_with_its_cell(run):
    run(LOOP + """
import os
os.environ["IPYTHONDIR"] = __import__("tempfile").mkdtemp()
from IPython.core.interactiveshell import InteractiveShell
shell = InteractiveShell.instance()
shell.history_manager.enabled = False
shell.showtraceback = lambda *_, **__: None
shell.push(dict(gt=gt, torch=torch, nn=nn, model=model, loss_of=loss_of))
def cell(text, fails=False):
    assert shell.run_cell(text).success != fails
    s = shell.user_ns["s"]
    return s._open is None, turns(s)
assert cell("s = gt.session('notebook', device='host').open(); opened = []") == (True, 0)
assert cell("optimizer = torch.optim.SGD(model.parameters(), lr=0.1); gt.attach(optimizer)") == (True, 0)
assert cell("out = model(torch.rand(4, 4)); opened.append(s._open is not None)") == (True, 1)
assert cell("loss = loss_of(out, torch.tensor([0, 1, 0, 1])); loss.backward(); optimizer.step()") == (True, 2)
assert cell("loss = loss_of(model(torch.rand(4, 4)), torch.tensor([0, 1, 0, 9]))", fails=True) == (True, 3)      # no such class
assert cell("with s.iteration(): pass") == (True, 4)
assert shell.user_ns["opened"] == [True]
""", cuda=False)


def test_a_loop_on_cuda_gives_its_turn_while_data_are_loaded(run):
    run("""
import gpushare.torch as gt
class Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        return x.clone()
    @staticmethod
    def backward(ctx, g):
        return None, torch.zeros_like(g[0])
class Copies(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1000))
    def forward(self, x):
        return Copy.apply(x, self.weight)
class Step(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {})
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.copy_(p.grad)
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 8
    def __getitem__(self, index):
        with other.iteration():                           # the other session has a turn meanwhile
            torch.empty(1000, device=other.device)
        return torch.full((1000,), float(index))
with gt.session("other", memory="64M") as other, gt.session("loop", memory="64M") as s:
    model = Copies().to(s.device)
    optimizer = Step(model.parameters())
    gt.attach(optimizer)
    for x in torch.utils.data.DataLoader(Data(), batch_size=2):
        optimizer.zero_grad()
        out = model(x.to(s.device))
        assert s._open is not None and torch.equal(out.cpu(), x)
        out.backward(torch.zeros_like(out))
        optimizer.step()
    s.runtime.synchronize()
    assert s.info()["iterations_done"] == 4 and other.info()["iterations_done"] == 8
    home = torch.cuda.current_stream()
    out = model(x.to(s.device))
    assert s._open is not None and torch.cuda.current_stream() != home
    del out                                               # no step comes of it
    assert s._open is None and torch.cuda.current_stream() == home
""")


@needs("accelerate")
def test_accelerate(run):
    run(LOOP + """
from accelerate import Accelerator
with gt.session("accelerate", device="host") as s:
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=3)
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1), batches(s))
    gt.attach(optimizer)
    for x, y in data:
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model(x), y))
            optimizer.step()
            optimizer.zero_grad()
    assert turns(s) >= 1 and s._open is None
    accelerator.save_state("state", safe_serialization=False)
    accelerator.load_state("state")
""".replace('"state"', 'folder + "/state"').replace("from accelerate import", "import tempfile\nfolder = tempfile.mkdtemp()\nfrom accelerate import"), cuda=False)


@needs("accelerate", "transformers")
def test_transformers_trainer(run):
    run(LOOP + """
import tempfile
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return {"input_ids": torch.full((8,), i % 50), "attention_mask": torch.ones(8, dtype=torch.long), "labels": torch.tensor(i % 2)}
def trained(callbacks, steps=6, resume=None, folder=None, **more):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=32, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32))
    settings = TrainingArguments(folder or tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=steps, report_to=[], use_cpu=True,
                                 disable_tqdm=True, save_strategy="steps", save_steps=3, eval_strategy="steps", eval_steps=3, **more)
    trainer = Trainer(model, settings, train_dataset=Texts(), eval_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return [p.detach().clone() for p in model.parameters()]

class Turns(TrainerCallback):
    def __init__(self, s):
        self.s = s
    def on_train_begin(self, args, state, control, optimizer=None, **_):
        gt.attach(optimizer, to=self.s)

expected = trained([])
for more in ({}, {"gradient_accumulation_steps": 2}):
    with gt.session("hf", device="host") as s:
        folder = tempfile.mkdtemp()
        found = trained([Turns(s)], folder=folder, **more)
        assert turns(s) >= 6 and s._open is None, turns(s)
        if not more:
            assert all(torch.equal(a, b) for a, b in zip(expected, found))
            trained([Turns(s)], steps=9, folder=folder, resume=folder + "/checkpoint-6")
            assert s._open is None
class Fails(Turns):
    def on_step_end(self, *_, **__):
        raise ValueError("a callback fails")
with gt.session("fails", device="host") as s:
    for again in range(2):
        try:
            trained([Fails(s)])
            raise AssertionError
        except ValueError:
            pass
    trained([Turns(s)], steps=3)
""", cuda=False)


@needs("lightning")
def test_lightning(run):
    run(LOOP + """
import logging, warnings
import lightning
warnings.simplefilter("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.network = model
    def training_step(self, batch, number):
        return loss_of(self.network(batch[0]), batch[1])
    def validation_step(self, batch, number):
        self.log("loss", loss_of(self.network(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Turns(lightning.Callback):
    def on_train_start(self, trainer, module):
        gt.attach(trainer.optimizers, to=s)
with gt.session("lightning", device="host") as s:
    trainer = lightning.Trainer(accelerator="cpu", max_epochs=2, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, callbacks=[Turns()])
    trainer.fit(Module(), batches(None), batches(None))
    assert turns(s) >= 6 and s._open is None, turns(s)
""", cuda=False)


def test_sessions_of_notebooks_and_threads(run):
    """Without a `with` block, on several threads, one after the other."""
    run("""
import gpushare.torch as gt
s = gt.session("notebook", memory="64M").open()            # a cell
w = torch.full((1000,), 7.0).to(s.device)                  # the next one
assert s.memory()["current_bytes"] >= 4000
with s.iteration():
    torch.empty(1000, device=s.device)
def elsewhere():
    t = gt.session("thread", memory="64M").open()
    kept.append(torch.full((1000,), 3.0).to(t.device))
    with s.iteration():                                    # of a session that another thread opened
        torch.empty(1000, device=s.device)
    assert t.memory()["current_bytes"] >= 4000
    t.close()
kept = []
thread = threading.Thread(target=elsewhere)
thread.start(); thread.join()
assert kept[0].cpu().sum() == 3000
outer = torch.cuda.current_stream()
s.close()
assert torch.cuda.current_stream() != outer and w.cpu().sum() == 7000
with gt.session("again", memory="64M") as again:
    assert torch.zeros(10, device=again.device).cpu().sum() == 0
""")


ON_CUDA = f"""
import sys, tempfile, warnings, logging
sys.path.insert(0, {str(pathlib.Path(__file__).parent)!r})
import cpu_kernels                                         # the stand-in computes nothing itself
import gpushare.torch as gt
from torch import nn
warnings.simplefilter("ignore")
torch.set_num_threads(1)
folder = tempfile.mkdtemp()

def network():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.1), nn.Linear(8, 2))

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 12
    def __getitem__(self, index):
        return torch.full((4,), index / 12), torch.tensor(index % 2)

def batches():
    return torch.utils.data.DataLoader(Data(), batch_size=4)

loss_of = nn.CrossEntropyLoss()

def turns(s):
    s.runtime.synchronize()
    return s.info()["iterations_done"]

def mistake():
    raise KeyError("a mistake")

def too_large():
    try:
        torch.empty(1 << 28, device="cuda")
        raise AssertionError
    except torch.OutOfMemoryError as error:
        assert gt.is_out_of_memory(error)

def same(these, those):
    return all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(these.parameters(), those.parameters()))
"""


@needs("accelerate")
def test_accelerate_on_cuda(run):
    """Trains as on the CPU, saves, resumes, validates, fails and runs out of memory, and goes on after each."""
    run(ON_CUDA + """
from accelerate import Accelerator
def train(device, epochs, meanwhile=None):
    global s
    accelerator = Accelerator(cpu=device == "cpu")
    plain = network()
    model, optimizer, data = accelerator.prepare(plain, torch.optim.AdamW(plain.parameters(), lr=0.1), batches())
    if device == "cuda":
        assert next(model.parameters()).is_cuda and s.memory()["current_bytes"] > 0
        gt.attach(optimizer)
    if epochs < 0:
        accelerator.load_state(folder)
    torch.manual_seed(7)
    for epoch in range(abs(epochs)):
        for number, (x, y) in enumerate(data):
            loss = loss_of(model(x), y)
            accelerator.backward(loss)
            if meanwhile and number == 1:
                meanwhile()
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        for x, y in data:
            model(x)
    accelerator.save_state(folder, safe_serialization=False)
    from accelerate.state import AcceleratorState
    AcceleratorState._reset_state(True)
    return plain
s = gt.session("accelerate", memory="64M").open()          # before all else: training on the CPU asks CUDA for its generator
expected = train("cpu", 2)
resumed = train("cpu", -1)
with cpu_kernels.CpuKernels():
    assert same(train("cuda", 2), expected)
    assert turns(s) == 9 and s._open is None
    assert same(train("cuda", -1), resumed)
    try:
        train("cuda", 1, mistake)
        raise AssertionError
    except KeyError:
        pass
    train("cuda", 1, too_large)
    gc.collect()
    assert s._open is None and s.memory()["failures"] == 1
""")


@needs("accelerate", "transformers")
def test_transformers_trainer_on_cuda(run):
    run(ON_CUDA + """
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainerCallback, TrainingArguments
class Texts(torch.utils.data.Dataset):
    def __len__(self):
        return 32
    def __getitem__(self, i):
        return {"input_ids": torch.full((8,), i % 50), "attention_mask": torch.ones(8, dtype=torch.long), "labels": torch.tensor(i % 2)}
def trained(callbacks, steps=4, resume=None, into=None, cpu=False):
    torch.manual_seed(0)
    model = BertForSequenceClassification(BertConfig(vocab_size=64, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16,
                                                     hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, attn_implementation="eager"))
    settings = TrainingArguments(into or tempfile.mkdtemp(), per_device_train_batch_size=8, max_steps=steps, report_to=[], use_cpu=cpu, disable_tqdm=True,
                                 save_strategy="steps", save_steps=2, eval_strategy="steps", eval_steps=2, logging_steps=2)
    trainer = Trainer(model, settings, train_dataset=Texts(), eval_dataset=Texts(), callbacks=callbacks)
    trainer.train(resume_from_checkpoint=resume)
    return model, trainer
class Turns(TrainerCallback):
    meanwhile = None
    def on_train_begin(self, args, state, control, optimizer=None, **_):
        gt.attach(optimizer, to=s)
    def on_step_end(self, *_, **__):
        if self.meanwhile:
            self.meanwhile()
s = gt.session("hf", memory="64M").open()
expected, _ = trained([], cpu=True)
with cpu_kernels.CpuKernels():
    found, trainer = trained([Turns()], into=folder)
    assert next(found.parameters()).is_cuda and turns(s) >= 4 and s._open is None
    assert all(torch.allclose(a.cpu(), b, atol=1e-5) for a, b in zip(found.parameters(), expected.parameters()))
    assert trainer.evaluate()["eval_loss"] > 0
    again, _ = trained([Turns()], into=folder, resume=folder + "/checkpoint-2")
    assert all(torch.allclose(a.cpu(), b.cpu(), atol=1e-5) for a, b in zip(again.parameters(), found.parameters()))
    failing = Turns()
    failing.meanwhile = mistake
    try:
        trained([failing])
        raise AssertionError
    except KeyError:
        pass
    failing.meanwhile = too_large
    trained([failing], steps=2)
    assert s._open is None and s.memory()["failures"] == 2
""")


@needs("lightning")
def test_lightning_on_cuda(run):
    run(ON_CUDA + """
import lightning
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
class Module(lightning.LightningModule):
    def __init__(self, meanwhile=None):
        super().__init__()
        self.network, self.meanwhile = network(), meanwhile
    def training_step(self, batch, number):
        if self.meanwhile and number == 1:
            self.meanwhile()
        return loss_of(self.network(batch[0]), batch[1])
    def validation_step(self, batch, number):
        self.log("loss", loss_of(self.network(batch[0]), batch[1]))
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)
class Turns(lightning.Callback):
    def on_train_start(self, trainer, module):
        gt.attach(trainer.optimizers, to=s)
def fit(module, device="gpu", epochs=2, resume=None):
    torch.manual_seed(7)
    trainer = lightning.Trainer(accelerator=device, devices=1, max_epochs=epochs, logger=False, enable_checkpointing=False, enable_progress_bar=False,
                                enable_model_summary=False, callbacks=[] if device == "cpu" else [Turns()])
    trainer.fit(module, batches(), batches(), ckpt_path=resume)
    return trainer, module.network
s = gt.session("lightning", memory="64M").open()
_, expected = fit(Module(), "cpu")
with cpu_kernels.CpuKernels():
    trainer, found = fit(Module())
    assert turns(s) >= 6 and same(found, expected)
    trainer.save_checkpoint(folder + "/last.ckpt")
    before = turns(s)
    fit(Module(), epochs=3, resume=folder + "/last.ckpt")
    assert turns(s) >= before + 3
    try:
        fit(Module(mistake))
        raise AssertionError
    except KeyError:
        pass
    fit(Module(too_large), epochs=1)
    assert s._open is None and s.memory()["failures"] == 1
""")
