def register_optimizer_step_pre_hook(hook):
    pass


def register_optimizer_step_post_hook(hook):
    pass
