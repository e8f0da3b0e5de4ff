"""What each task does."""


def work(task, inputs, outputs):
    for out in outputs.values():
        out[:] = 1
