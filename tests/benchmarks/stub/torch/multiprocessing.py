def start_processes(*args, **kwargs):
    raise NotImplementedError("this is a stub of torch")
