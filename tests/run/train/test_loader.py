"""DataLoaders and iterable datasets by number: the order follows the seed and the epoch, whoever asks, with workers or without."""

from __future__ import annotations

import multiprocessing
from types import SimpleNamespace

import pytest
import torch

from meshwright.errors import Unsupported, UsageError
from meshwright.run.steps.forward_graph import TensorInfo
from meshwright.run.train.data import Batches, open_data

DATA = "tests/run/loader_data.py:"


def opened(name, seed=0, batch=4):
    return open_data(DATA + name, (), seed, batch)


def firsts(data, count, start=0):
    return [int(data.sample(i)[0][0]) for i in range(start, start + count)]


def layout(replicas, microbatch, batch):
    return SimpleNamespace(
        global_batch=batch, microbatch_size=microbatch, first_sample=lambda d, m: d * batch // replicas + m * microbatch
    )


def test_epochs_are_shuffled_by_seed_and_number():
    data = opened("shuffled")
    order = firsts(data, 30)
    epochs = [order[:10], order[10:20], order[20:]]
    assert all(sorted(e) == list(range(10)) for e in epochs) and len({tuple(e) for e in epochs}) == 3
    assert firsts(opened("shuffled"), 5, start=17) == order[17:22], "a resumed run begins anywhere"
    assert firsts(opened("shuffled", seed=1), 30) != order
    assert firsts(opened("own_generator"), 20) == firsts(opened("own_generator"), 20) != order[:20]
    assert set(firsts(opened("weighted"), 20)) <= set(range(1, 10))


def test_augmentation_is_the_samples_own():
    torch.manual_seed(1)
    data = opened("shuffled")
    before = torch.get_rng_state()
    noise = [data.sample(i)[1] for i in range(6)]
    assert torch.equal(torch.get_rng_state(), before), "the run's own generator stays"
    torch.manual_seed(2)
    assert all(torch.equal(opened("shuffled").sample(i)[1], noise[i]) for i in (5, 0, 3))
    assert len({float(x) for n in noise for x in n}) == 18


@pytest.mark.parametrize("replicas", [1, 2])
def test_batches_are_the_same_for_any_layout_with_workers_too(replicas):
    whole = opened("shuffled", batch=4)
    inputs = [TensorInfo((1, 1), "float32"), TensorInfo((1, 3), "float32")]
    batches = Batches(opened("with_workers"), layout(replicas, 1, 4), inputs, torch.device("cpu"))
    for step in (0, 1, 2, 3, 7, 8, 9, 2, 3):  # on, and elsewhere
        for d in range(replicas):
            for m in range(4 // replicas):
                x, noise = batches.microbatch(step, d, m)
                expected = whole.sample(step * 4 + d * 4 // replicas + m)
                assert torch.equal(x[0], expected[0]) and torch.equal(noise[0], expected[1])
    assert batches.dataset.ahead.fetched is not None and multiprocessing.active_children()
    batches.close()
    assert batches.dataset.ahead.fetched is None and not multiprocessing.active_children()


def test_a_rest_is_dropped_or_begins_the_next_epoch():
    data = opened("dropping", batch=4)
    assert data.length == 8 and len(set(firsts(data, 8))) == 8 and len(set(firsts(data, 8, start=8))) == 8
    assert opened("shuffled").length == 10


def test_collate_functions_make_the_batch():
    x, noise = opened("collated").rows(2, 3)
    assert x.tolist() == [2.0, 3.0, 4.0] and noise.shape == (3, 3)
    with pytest.raises(UsageError, match="a batch is a dict of 'input_ids', 'labels'"):
        opened("dictionaries").rows(0, 2)


def test_iterable_datasets_go_on_in_the_next_epoch_and_are_found_again():
    data = opened("streamed")
    rows = torch.cat([data.rows(i, 3)[0] for i in range(0, 18, 3)])
    assert rows[:, 0].tolist() == [float(i % 7) for i in range(18)] and rows[:, 1].tolist() == [float(i // 7) for i in range(18)]
    again = opened("streamed")
    assert torch.equal(again.rows(9, 2)[0], rows[9:11]) and torch.equal(again.rows(4, 2)[0], rows[4:6])
    again.close()


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("batched", Unsupported, "has a batch sampler"),
        ("distributed", Unsupported, "divides samples among processes"),
        ("too_few", UsageError, "drops its 3 samples"),
    ],
)
def test_loaders_that_cannot_be_used_are_refused(name, error, message):
    with pytest.raises(error, match=message):
        opened(name)


def test_an_empty_stream_is_told():
    with pytest.raises(UsageError, match="the dataset is empty"):
        opened("nothing").sample(0)
