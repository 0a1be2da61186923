"""Healthy programs in which a rank calls later what another waits for: every way in which Python, torch and asyncio do.

Each is for a pair of ranks. The first leaves its call (`meet`) to something that acts after `SECONDS`, and ends the
cell, or waits; the second calls its part at once. A program puts away what it has made: on a rank where something
stands no other is judged. `batches` puts several pairs into one cell.

`KINDS`: kind → name → (the first rank's code, the second's; MEET where that is left out).
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator

from tests.pool.healthy import PREPARE, SECONDS

PAIRS = 4  # programs at once
MEET = "meet()"
HELPERS = """
import asyncio, concurrent.futures as cf, functools, multiprocessing as mp
import queue, signal, socket, subprocess, sys, threading
for name in ("first", "second"):
    both = [dist.new_group([r, r + 1], group_desc=name) for r in range(0, world, 2)]
    globals()[name] = both[rank // 2]
def meet(*args, **kwargs):
    dist.barrier(group=first)
def later():
    time.sleep(SECONDS)
    meet()
def shell(command):
    "A process that does something after a while."
    return subprocess.Popen(["sh", "-c", f"sleep {SECONDS}; {command}"], stdout=subprocess.PIPE)
def client(port, says="GET / HTTP/1.0\\r\\n\\r\\n"):
    "A process that connects after a while."
    code = f"import socket, time; time.sleep({SECONDS}); s = socket.create_connection(('127.0.0.1', {port})); "
    return subprocess.Popen([sys.executable, "-S", "-c", code + f"s.sendall({says!r}.encode()); s.recv(9)"])
fork = mp.get_context("fork")
"""

THREADS = {
    "an executor": "ex = cf.ThreadPoolExecutor(1); ex.submit(time.sleep, SECONDS); ex.submit(meet); ex.shutdown(False)",
    "an executor that calls torch itself": (
        "ex = cf.ThreadPoolExecutor(1); ex.submit(time.sleep, SECONDS); ex.submit(dist.barrier, first)\n"
        "ex.shutdown(False)"
    ),
    "an executor's initializer": "ex = cf.ThreadPoolExecutor(1, initializer=later); ex.submit(int); ex.shutdown(False)",
    "a callback on an executor's Future": (
        "ex = cf.ThreadPoolExecutor(1); ex.submit(time.sleep, SECONDS).add_done_callback(meet); ex.shutdown(False)"
    ),
    "a callback on a process pool's Future": (
        "ex = cf.ProcessPoolExecutor(1, mp_context=fork); ex.submit(time.sleep, SECONDS).add_done_callback(meet)\n"
        "ex.shutdown(False)"
    ),
    "a Timer": "threading.Timer(SECONDS, meet).start()",
    "a Timer of a function of torch's": "threading.Timer(SECONDS, dist.barrier, (first,)).start()",
    "sched": (
        "import sched\nplan = sched.scheduler(); plan.enter(SECONDS, 1, dist.barrier, (first,))\n"
        "threading.Thread(target=plan.run).start()"
    ),
    "a thread that sleeps": "threading.Thread(target=later, daemon=True).start()",
    "a thread without an object": "import _thread\n_thread.start_new_thread(later, ())",
    "a thread of IPython's": (
        "from IPython.lib.backgroundjobs import BackgroundJobManager\njobs = BackgroundJobManager(); jobs.new(later)"
    ),
    "a thread that reads a queue": (
        "calls = queue.SimpleQueue()\nthreading.Thread(target=lambda: calls.get()()).start()\n"
        "threading.Timer(SECONDS, calls.put, (meet,)).start()"
    ),
    "a thread that reads a queue of processes": (
        "calls = fork.Queue()\n"
        "child = fork.Process(target=lambda: (time.sleep(SECONDS), calls.put(1))); child.start()\n"
        "def read():\n    calls.get(); meet(); calls.close(); child.join()\nthreading.Thread(target=read).start()"
    ),
    "a QueueListener": (
        "import logging, logging.handlers\nrecords = queue.Queue()\n"
        "class Calls(logging.Handler):\n"
        "    def emit(self, record): meet(); threading.Thread(target=listener.stop).start()\n"
        "listener = logging.handlers.QueueListener(records, Calls()); listener.start()\n"
        "threading.Timer(SECONDS, records.put, (logging.makeLogRecord({}),)).start()"
    ),
    "an Event": (
        "event = threading.Event()\nthreading.Thread(target=lambda: (event.wait(), meet())).start()\n"
        "threading.Timer(SECONDS, event.set).start()"
    ),
    "a Condition": (
        "when = threading.Condition()\ndef wait():\n    with when: when.wait()\n    meet()\n"
        "def tell():\n    with when: when.notify_all()\n"
        "threading.Thread(target=wait).start(); threading.Timer(SECONDS, tell).start()"
    ),
    "the action of a Barrier": (
        "both = threading.Barrier(2, action=meet)\n"
        "threading.Thread(target=both.wait).start(); threading.Timer(SECONDS, both.wait).start()"
    ),
    "threading.excepthook": (
        "kept = threading.excepthook\ndef hook(args):\n    threading.excepthook = kept; meet()\n"
        "threading.excepthook = hook; threading.Timer(SECONDS, lambda: 1 / 0).start()"
    ),
    "a finalizer": (
        "import weakref\nclass It: pass\n"
        "def hold(it):\n    weakref.finalize(it, meet); time.sleep(SECONDS)\n"
        "threading.Thread(target=hold, args=(It(),)).start()"
    ),
    "__del__": (
        "class It:\n    def __del__(self): meet()\n"
        "threading.Thread(target=lambda it: time.sleep(SECONDS), args=(It(),)).start()"
    ),
    "an audit hook": (
        "sys.addaudithook(lambda event, args: meet() if event == 'it.is.time' else None)\n"
        "threading.Timer(SECONDS, sys.audit, ('it.is.time',)).start()"
    ),
    "a profile function": (
        "def profile(frame, event, arg):\n    if frame.f_code.co_name == 'go': sys.setprofile(None); meet()\n"
        "def go(): pass\n"
        "threading.setprofile(profile); threading.Timer(SECONDS, go).start(); threading.setprofile(None)"
    ),
    "a thread of C's": (
        "import ctypes\nCALL = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p)\n"
        "kept = CALL(lambda it: later()); thread = ctypes.c_ulong()\n"
        "ctypes.CDLL(None).pthread_create(ctypes.byref(thread), None, kept, None)"
    ),
    "faulthandler beside a thread": (
        "import faulthandler\nfaulthandler.dump_traceback_later(60)\n"
        "def wait():\n    later(); faulthandler.cancel_dump_traceback_later()\nthreading.Thread(target=wait).start()"
    ),
}
SERVERS = {
    "http.server": (
        "import http.server\nclass Handler(http.server.BaseHTTPRequestHandler):\n"
        "    def do_GET(self): meet(); self.send_response(200); self.end_headers(); end.start()\n"
        "    def log_message(self, *args): pass\n"
        "server = http.server.HTTPServer(('127.0.0.1', 0), Handler)\nend = threading.Thread(target=server.shutdown)\n"
        "threading.Thread(target=server.serve_forever, args=(0.05,)).start(); child = client(server.server_port)"
    ),
    "socketserver": (
        "import socketserver\nclass Handler(socketserver.BaseRequestHandler):\n"
        "    def handle(self): self.request.recv(9); meet(); end.start()\n"
        "server = socketserver.ThreadingTCPServer(('127.0.0.1', 0), Handler)\n"
        "end = threading.Thread(target=server.shutdown)\n"
        "threading.Thread(target=server.serve_forever, args=(0.05,)).start(); child = client(server.server_address[1])"
    ),
    "xmlrpc": (
        "import xmlrpc.server\nserver = xmlrpc.server.SimpleXMLRPCServer(('127.0.0.1', 0), logRequests=False)\n"
        "server.register_function(lambda: (meet(), 0)[1], 'meet')\n"
        "threading.Thread(target=server.handle_request).start()\n"
        "child = shell(f'{sys.executable} -c \"import xmlrpc.client as c; "
        "c.ServerProxy(\\'http://127.0.0.1:{server.server_address[1]}\\').meet()\"')"
    ),
    "a socket that is accepted from": (
        "at = socket.create_server(('127.0.0.1', 0))\nthreading.Thread(target=lambda: (at.accept(), meet())).start()\n"
        "child = client(at.getsockname()[1])"
    ),
    "selectors": (
        "import selectors\nends = socket.socketpair(); of = selectors.DefaultSelector()\n"
        "of.register(ends[0], selectors.EVENT_READ, meet)\n"
        "threading.Thread(target=lambda: [key.data() for key, _ in of.select()]).start()\n"
        "threading.Timer(SECONDS, ends[1].send, (b'x',)).start()"
    ),
    "a Listener of multiprocessing's": (
        "from multiprocessing.connection import Listener\nat = Listener(('127.0.0.1', 0))\n"
        "threading.Thread(target=lambda: (at.accept(), meet())).start(); child = client(at.address[1])"
    ),
}
PROCESSES = {
    "a callback of a Pool": ("of = fork.Pool(1); of.apply_async(time.sleep, (SECONDS,), callback=meet); of.close()"),
    "an error callback of a Pool": (
        "def fail(): time.sleep(SECONDS); raise ValueError\n"
        "of = fork.Pool(1); of.apply_async(fail, error_callback=meet); of.close()"
    ),
    "a callback of a ThreadPool": (
        "from multiprocessing.pool import ThreadPool\n"
        "of = ThreadPool(1); of.apply_async(time.sleep, (SECONDS,), callback=meet); of.close()"
    ),
    "a reader of a process": (
        "child = shell('echo x')\ndef read():\n    for line in child.stdout: meet()\n"
        "threading.Thread(target=read).start()"
    ),
    "a thread that waits for a process": (
        "child = shell('true')\nthreading.Thread(target=lambda: (child.wait(), meet())).start()"
    ),
    "the sentinel of a process": (
        "from multiprocessing.connection import wait\nchild = fork.Process(target=time.sleep, args=(SECONDS,))\n"
        "child.start(); threading.Thread(target=lambda: (wait([child.sentinel]), meet())).start()"
    ),
    "a child that sets a key of the store": (
        "store = dist.distributed_c10d._get_default_store()\n"
        "child = fork.Process(target=lambda: (time.sleep(SECONDS), store.set(f'key{rank}', 'x'))); child.start()",
        "dist.distributed_c10d._get_default_store().wait([f'key{rank - 1}'])",
    ),
    "a child of the waiting rank, which sets a key": (
        "pass",
        "store, other = [\n"
        "    dist.TCPStore(os.environ['MASTER_ADDR'], int(os.environ['MASTER_PORT']), is_master=False)\n"
        "    for _ in range(2)]\n"
        "child = fork.Process(target=lambda: (time.sleep(SECONDS), other.set(f'own{rank}', 'x'))); child.start()\n"
        "store.wait([f'own{rank}'])",
    ),
}
LOOPS = {
    "a task": "async def do():\n    await asyncio.sleep(SECONDS); meet()\ntask = asyncio.create_task(do())",
    "call_later": "asyncio.get_running_loop().call_later(SECONDS, meet)",
    "call_later of a function of torch's": "asyncio.get_running_loop().call_later(SECONDS, dist.barrier, first)",
    "call_later from a thread": (
        "loop = asyncio.get_running_loop()\n"
        "def ask(): loop.call_soon_threadsafe(loop.call_later, SECONDS, meet)\nthreading.Thread(target=ask).start()"
    ),
    "a callback on a task of asyncio's": "asyncio.create_task(asyncio.sleep(SECONDS)).add_done_callback(meet)",
    "a callback on a Future of a loop": (
        "loop = asyncio.get_running_loop(); future = loop.create_future(); future.add_done_callback(meet)\n"
        "loop.call_later(SECONDS, future.set_result, None)"
    ),
    "a reader of a loop": (
        "loop = asyncio.get_running_loop(); child = shell('echo x'); at = child.stdout.fileno()\n"
        "loop.add_reader(at, lambda: (loop.remove_reader(at), meet()))"
    ),
    "a server of a loop": (
        "async def serve(reader, writer):\n    meet(); writer.close(); server.close()\n"
        "server = await asyncio.start_server(serve, '127.0.0.1', 0)\n"
        "child = client(server.sockets[0].getsockname()[1])"
    ),
    "a datagram": (
        "class Protocol(asyncio.DatagramProtocol):\n"
        "    def datagram_received(self, data, place): meet(); ends[0].close()\n"
        "ends = await asyncio.get_running_loop().create_datagram_endpoint(Protocol, ('127.0.0.1', 0))\n"
        "port = ends[0].get_extra_info('sockname')[1]; own = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
        "threading.Timer(SECONDS, own.sendto, (b'x', ('127.0.0.1', port))).start()"
    ),
    "run_in_executor": (
        "ex = cf.ThreadPoolExecutor(1)\n"
        "asyncio.get_running_loop().run_in_executor(ex, time.sleep, SECONDS).add_done_callback(meet)\n"
        "ex.shutdown(False)"
    ),
    "a subprocess of a loop": (
        "async def do():\n"
        "    child = await asyncio.create_subprocess_exec('sleep', str(SECONDS)); await child.wait(); meet()\n"
        "task = asyncio.create_task(do())"
    ),
    "a loop in a thread": (
        "other = asyncio.new_event_loop(); threading.Thread(target=other.run_forever, daemon=True).start()\n"
        "async def do():\n    await asyncio.sleep(SECONDS); meet(); other.stop()\n"
        "future = asyncio.run_coroutine_threadsafe(do(), other)"
    ),
    "asyncio.run in a thread": (
        "async def do():\n    await asyncio.sleep(SECONDS); meet()\n"
        "threading.Thread(target=lambda: asyncio.run(do())).start()"
    ),
    "tornado": "from tornado.ioloop import IOLoop\nIOLoop.current().call_later(SECONDS, meet)",
    "a PeriodicCallback": (
        "from tornado.ioloop import PeriodicCallback\n"
        "def once():\n    again.stop(); meet()\nagain = PeriodicCallback(once, SECONDS * 1000); again.start()"
    ),
}
SIGNALS = {
    "setitimer": (
        "def handler(*args):\n    signal.signal(signal.SIGALRM, signal.SIG_DFL); meet()\n"
        "signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, SECONDS)"
    ),
    "a handler of torch's function": (
        "def undo(*args):\n    signal.signal(signal.SIGUSR2, signal.SIG_DFL)\n"
        "class Calls:\n    def __call__(self, *args): undo(); meet()\n"
        "signal.signal(signal.SIGUSR2, Calls()); child = shell(f'kill -USR2 {os.getpid()}')"
    ),
    "the end of a process": (
        "def handler(*args):\n    signal.signal(signal.SIGCHLD, signal.SIG_DFL); meet()\n"
        "child = shell('true'); signal.signal(signal.SIGCHLD, handler)"
    ),
    "a signal from another process": (
        "def handler(*args):\n    signal.signal(signal.SIGUSR1, signal.SIG_DFL); meet()\n"
        "signal.signal(signal.SIGUSR1, handler); child = shell(f'kill -USR1 {os.getpid()}')"
    ),
    "a signal of a loop": (
        "loop = asyncio.get_running_loop()\n"
        "loop.add_signal_handler(signal.SIGUSR1, lambda: (loop.remove_signal_handler(signal.SIGUSR1), meet()))\n"
        "child = shell(f'kill -USR1 {os.getpid()}')"
    ),
    "a signal to a rank that joins": (
        "def handler(*args):\n    signal.signal(signal.SIGALRM, signal.SIG_DFL); dist.barrier(group=second)\n"
        "signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, SECONDS)\n"
        "thread = threading.Thread(target=meet); thread.start(); thread.join()",
        "dist.barrier(group=second); meet()",
    ),
    "a handler that has begun, on a rank that joins": (
        "def handler(*args):\n    signal.signal(signal.SIGALRM, signal.SIG_DFL)\n"
        "    time.sleep(SECONDS); dist.barrier(group=second)\n"
        "signal.signal(signal.SIGALRM, handler); signal.setitimer(signal.ITIMER_REAL, 0.1)\n"
        "thread = threading.Thread(target=meet); thread.start(); thread.join()",
        "dist.barrier(group=second); meet()",
    ),
}
TORCH = {
    "a callback on a Future of torch's": (
        "future = torch.futures.Future(); after = future.then(meet)\n"
        "threading.Timer(SECONDS, future.set_result, (1,)).start()"
    ),
    "a callback on a Work": (
        "work = dist.all_reduce(torch.ones(1), group=second, async_op=True); after = work.get_future().then(meet)",
        "time.sleep(SECONDS); dist.all_reduce(torch.ones(1), group=second); meet()",
    ),
    "a hook of autograd in a thread": (
        "x = torch.ones(1, requires_grad=True); x.register_hook(meet)\n"
        "threading.Timer(SECONDS, (2 * x).sum().backward).start()"
    ),
    "a loader in a thread": (
        "class Slow(torch.utils.data.Dataset):\n    def __len__(self): return 1\n"
        "    def __getitem__(self, i): time.sleep(SECONDS); return i\n"
        "def load():\n    list(torch.utils.data.DataLoader(Slow(), num_workers=1)); meet()\n"
        "threading.Thread(target=load).start()"
    ),
    "two groups, crossed": (
        "ex = cf.ThreadPoolExecutor(1); ex.submit(time.sleep, SECONDS); ex.submit(meet); ex.shutdown(False)\n"
        "dist.barrier(group=second)",
        "meet(); dist.barrier(group=second)",
    ),
    "two groups, crossed by a callback": (
        "ex = cf.ThreadPoolExecutor(1); ex.submit(time.sleep, SECONDS).add_done_callback(meet); ex.shutdown(False)\n"
        "dist.all_reduce(torch.ones(1), group=second)",
        "meet(); dist.all_reduce(torch.ones(1), group=second)",
    ),
    "a send by a callback, a receive in the main thread": (
        "ex = cf.ThreadPoolExecutor(1)\n"
        "ex.submit(time.sleep, SECONDS).add_done_callback(lambda f: dist.send(torch.ones(1), rank + 1))\n"
        "ex.shutdown(False)\n"
        "dist.recv(torch.ones(1), rank + 1)",
        "dist.recv(torch.ones(1), rank - 1); dist.send(torch.ones(1), rank - 1)",
    ),
}
# what is called by what another thing does, or where nobody thinks of a call
HOOKS = {
    "a trace function": (
        "def trace(frame, event, arg):\n    if frame.f_code.co_name == 'go': sys.settrace(None); meet()\n"
        "def go(): pass\n"
        "threading.settrace(trace); threading.Timer(SECONDS, go).start(); threading.settrace(None)"
    ),
    "a collection of garbage": (
        "import gc\ndef collected(phase, about): gc.callbacks.remove(collected); meet()\n"
        "def collect(): gc.callbacks.append(collected); gc.collect()\nthreading.Timer(SECONDS, collect).start()"
    ),
    "a fork": (
        "once = []\ndef forked():\n    if not once: once.append(1); meet()\n"
        "os.register_at_fork(after_in_parent=forked)\n"
        "def fork_once():\n    child = fork.Process(target=int); child.start(); child.join()\n"
        "threading.Timer(SECONDS, fork_once).start()"
    ),
    "the end of a generator": (
        "def rows():\n    try: yield\n    finally: meet()\n"
        "def hold(its): next(its); time.sleep(SECONDS); its.close()\n"
        "threading.Thread(target=hold, args=(rows(),)).start()"
    ),
    "what a thread has of its own": (
        "own = threading.local()\nclass It:\n    def __del__(self): meet()\n"
        "def hold(): own.it = It(); time.sleep(SECONDS)\nthreading.Thread(target=hold).start()"
    ),
    "a signal that a thread waits for": (
        "def wait():\n    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})\n"
        "    signal.sigwait({signal.SIGUSR1}); meet()\n"
        "thread = threading.Thread(target=wait); thread.start()\n"
        "threading.Timer(SECONDS, lambda: signal.pthread_kill(thread.ident, signal.SIGUSR1)).start()"
    ),
}
EVENTS = {
    "epoll": (
        "import select\nends, of = socket.socketpair(), select.epoll()\nof.register(ends[0], select.EPOLLIN)\n"
        "threading.Thread(target=lambda: (of.poll(), meet())).start()\n"
        "threading.Timer(SECONDS, ends[1].send, (b'x',)).start()"
    ),
    "inotify": (
        "import ctypes, tempfile\nfolder, libc = tempfile.mkdtemp(), ctypes.CDLL(None)\nat = libc.inotify_init()\n"
        "libc.inotify_add_watch(at, folder.encode(), 0x100); child = shell(f'touch {folder}/it')\n"
        "threading.Thread(target=lambda: (os.read(at, 999), os.close(at), meet())).start()"
    ),
    "a file that is looked for": (
        "import tempfile\nfolder = tempfile.mkdtemp(); child = shell(f'touch {folder}/it')\n"
        "def look():\n    while not os.path.exists(f'{folder}/it'): time.sleep(0.05)\n    meet()\n"
        "threading.Thread(target=look).start()"
    ),
    "a lock of a file": (
        "import fcntl, tempfile\nfile = tempfile.NamedTemporaryFile()\n"
        "child = subprocess.Popen(['flock', file.name, 'sleep', str(SECONDS)])\ntime.sleep(0.2)\n"
        "threading.Thread(target=lambda: (fcntl.flock(file, fcntl.LOCK_EX), meet())).start()"
    ),
    "an answer that takes long": (
        "import urllib.request\nat = socket.create_server(('127.0.0.1', 0)); port = at.getsockname()[1]\n"
        "code = f'import socket, time; s = socket.socket(fileno={at.fileno()}); c = s.accept()[0]; c.recv(999); '\n"
        "code += f'time.sleep({SECONDS}); c.sendall(b\"HTTP/1.0 200 OK\\\\r\\\\n\\\\r\\\\n\")'\n"
        "child = subprocess.Popen([sys.executable, '-S', '-c', code], pass_fds=[at.fileno()])\n"
        "def ask(): urllib.request.urlopen(f'http://127.0.0.1:{port}').read(); meet()\n"
        "threading.Thread(target=ask).start()"
    ),
    "a manager": (
        "its = fork.Manager(); event = its.Event()\n"
        "def tell():\n    time.sleep(SECONDS); event.set()\nchild = fork.Process(target=tell); child.start()\n"
        "threading.Thread(target=lambda: (event.wait(), meet(), child.join(), its.shutdown())).start()"
    ),
    "a queue's join": (
        "calls = queue.Queue(); calls.put(later)\n"
        "def work(): calls.get()(); calls.task_done()\nthreading.Thread(target=work).start(); calls.join()"
    ),
    "as_completed of a spawned process": (
        "ex = cf.ProcessPoolExecutor(1, mp_context=mp.get_context('spawn')); asked = ex.submit(time.sleep, SECONDS)\n"
        "def wait():\n    for _ in cf.as_completed([asked]): meet()\n    ex.shutdown()\n"
        "threading.Thread(target=wait).start()"
    ),
    "several Futures of torch's": (
        "futures = [torch.futures.Future() for _ in range(2)]\n"
        "after = torch.futures.collect_all(futures).then(meet); futures[0].set_result(1)\n"
        "threading.Timer(SECONDS, futures[1].set_result, (1,)).start()"
    ),
    "a protocol of a process of a loop": (
        "class Protocol(asyncio.SubprocessProtocol):\n    def process_exited(self): meet(); transport.close()\n"
        "loop = asyncio.get_running_loop()\n"
        "transport, _ = await loop.subprocess_exec(Protocol, 'sleep', str(SECONDS))"
    ),
    "the end of an asynchronous generator": (
        "async def rows():\n    try: yield\n    finally: meet()\n"
        "async def hold():\n    its = rows(); await its.__anext__(); await asyncio.sleep(SECONDS); await its.aclose()\n"
        "task = asyncio.ensure_future(hold())"
    ),
    "a stream of zmq's": (
        "import zmq\nfrom zmq.eventloop.zmqstream import ZMQStream\ncontext = zmq.Context()\n"
        "gets = context.socket(zmq.PULL); gets.bind('inproc://it'); puts = context.socket(zmq.PUSH)\n"
        "puts.connect('inproc://it'); stream = ZMQStream(gets)\n"
        "def got(message): stream.close(); puts.close(); meet()\nstream.on_recv(got)\n"
        "threading.Timer(SECONDS, puts.send, (b'x',)).start()"
    ),
    "anyio in a thread": (
        "import anyio\nasync def do():\n"
        "    async with anyio.create_task_group() as group: group.start_soon(anyio.sleep, SECONDS)\n    meet()\n"
        "threading.Thread(target=anyio.run, args=(do,)).start()"
    ),
    "joblib": (
        "import joblib\n"
        "def load(): joblib.Parallel(2, backend='threading')([joblib.delayed(time.sleep)(SECONDS)]); meet()\n"
        "threading.Thread(target=load).start()"
    ),
}
# a thread of the C library's comes to Python late; it stays, so what is run after it is not judged
TIMER_OF_C = (
    "import ctypes\nCALL = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_int)\n"
    "class Set(ctypes.Structure):\n    _fields_ = [('bits', ctypes.c_ulong * 16)]\n"
    "class Event(ctypes.Structure):\n"
    "    _fields_ = [('value', ctypes.c_void_p), ('signo', ctypes.c_int), ('notify', ctypes.c_int),\n"
    "                ('call', CALL), ('attributes', ctypes.c_void_p), ('pad', ctypes.c_char * 64)]\n"
    "libc, timer = ctypes.CDLL(None), ctypes.c_void_p()\n"
    "kept = CALL(lambda it: (meet(), libc.timer_delete(timer), None)[-1])\n"
    "event = Event(None, 0, 2, kept); when = (ctypes.c_long * 4)(0, 0, int(SECONDS), int(SECONDS % 1 * 1e9))\n"
    "assert libc.timer_create(1, ctypes.byref(event), ctypes.byref(timer)) == 0\n"
    "assert libc.timer_settime(timer, 0, ctypes.byref(when), None) == 0"
)
KINDS = {"threads": THREADS, "servers": SERVERS, "processes": PROCESSES, "loops": LOOPS, "signals": SIGNALS,
         "torch": TORCH, "hooks": HOOKS, "events": EVENTS}  # fmt: skip


def cell(*pairs: tuple[str, str]) -> str:
    """A cell in which each pair of ranks carries out one of these."""
    parts = [PREPARE.format(seconds=SECONDS), HELPERS]
    for rank, code in enumerate(itertools.chain(*pairs)):
        parts.append(f"if rank == {rank}:\n{textwrap.indent(code, '    ')}")
    return "\n".join(parts)


def batches() -> Iterator[tuple[str, str]]:
    """Names of some programs, and a cell for `2 * PAIRS` ranks in which each pair carries out one of them."""
    rows = [(f"{kind}: {name}", of) for kind, programs in KINDS.items() for name, of in programs.items()]
    for first in range(0, len(rows), PAIRS):
        some = list(itertools.islice(rows, first, first + PAIRS))
        codes = [of if isinstance(of, tuple) else (of, MEET) for _, of in some]
        yield "; ".join(name for name, _ in some), cell(*codes)
