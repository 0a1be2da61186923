"""What a process has begun with, as data: a program that writes it to `$BEGUN/<rank>.json`.

`drawn` is what no two processes have alike, and `given` what those of one launch have as torchrun's have it.
"""

DRAWN = """
import json, logging, multiprocessing, os, random, tempfile, uuid
import numpy, torch
from torch.utils.data import DataLoader, Dataset, random_split

class Augmented(Dataset):
    def __len__(self): return 4
    def __getitem__(self, i): return torch.rand(2)

drawn = {
    "torch.initial_seed": torch.initial_seed(),
    "weights": torch.nn.Linear(3, 3).weight.tolist(),
    "dropout": torch.nn.functional.dropout(torch.ones(128)).tolist(),
    "randperm": torch.randperm(100).tolist(),
    "split": list(random_split(range(100), [50, 50])[0].indices),
    "shuffled": [int(x) for x in DataLoader(range(100), shuffle=True)],
    "augmented by loader workers": [x.tolist() for x in DataLoader(Augmented(), num_workers=1)],
    "torch again": torch.rand(2).tolist(),
    "random": random.random(),
    "numpy": numpy.random.rand(),
    "numpy.default_rng": numpy.random.default_rng().random(),
    "uuid1": str(uuid.uuid1()),
    "uuid4": str(uuid.uuid4()),
    "temporary name": next(tempfile._get_candidate_names()),
    "authkey": multiprocessing.current_process().authkey.hex(),
}
"""
GIVEN = """
import asyncio, decimal, gc, locale, os, resource, signal, socket, sys, tempfile, threading, time
mask = os.umask(0); os.umask(mask)
status = dict(line.split(":", 1) for line in open("/proc/self/status").read().splitlines())
given = {
    "signals": {str(s): getattr(signal.getsignal(s), "__qualname__", str(signal.getsignal(s)))
                for s in signal.valid_signals()},
    "ignored": status["SigIgn"].strip(),
    "blocked": status["SigBlk"].strip(),
    "umask": mask,
    "limits": {n: resource.getrlimit(getattr(resource, n)) for n in dir(resource) if n.startswith("RLIMIT_")},
    "locale": locale.setlocale(locale.LC_ALL),
    "encoding": [locale.getpreferredencoding(), sys.getfilesystemencoding()],
    "time zone": [time.tzname, time.localtime().tm_gmtoff],
    "temporary folder": tempfile.gettempdir(),
    "flags": str(sys.flags),
    "recursion": sys.getrecursionlimit(),
    "switch interval": sys.getswitchinterval(),
    "collector": [gc.isenabled(), gc.get_threshold()],
    "decimal": str(decimal.getcontext()),
    "socket timeout": socket.getdefaulttimeout(),
    "stack size": threading.stack_size(),
    "main thread": threading.current_thread() is threading.main_thread(),
    "multiprocessing": [multiprocessing.current_process().name, multiprocessing.get_start_method(allow_none=True)],
    "loop policy": type(asyncio.get_event_loop_policy()).__name__,
    "nice": os.getpriority(os.PRIO_PROCESS, 0),
    "cores": sorted(os.sched_getaffinity(0)),
    "folder": os.getcwd(),
    "loggers": [type(handler).__name__ for handler in logging.getLogger().handlers] + [logging.getLogger().level],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads()],
    "torch": [str(x) for x in (torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(),
        torch.is_grad_enabled(), torch.is_anomaly_enabled(), torch.get_float32_matmul_precision(),
        torch.multiprocessing.get_sharing_strategy(), torch.is_warn_always_enabled(), torch._tensor_str.PRINT_OPTS,
        torch.is_autocast_enabled(), torch.backends.mkldnn.enabled, torch.initial_seed() == 0)],
}
"""
HASH = 'drawn["hash"] = hash("a string")\n'
WRITE = """
with open(os.path.join(os.environ["BEGUN"], os.environ["RANK"] + ".json"), "w") as file:
    json.dump({"drawn": drawn, "given": given}, file)
"""
PROGRAM = DRAWN + GIVEN + HASH + WRITE
