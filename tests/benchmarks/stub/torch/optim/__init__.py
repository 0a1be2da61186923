class Optimizer:
    pass
