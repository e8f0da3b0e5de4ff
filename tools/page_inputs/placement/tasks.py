"""What each task does."""


def work(task, inputs, outputs):
    for out in outputs:
        out[:] = 1
