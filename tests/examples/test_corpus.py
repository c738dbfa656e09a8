import sys

import numpy as np
import pytest
import torch
from corpus import Batches, Corpus, standard_library


def small(size: int = 10_000) -> Corpus:
    data = torch.from_numpy(np.random.default_rng(0).integers(0, 256, size).astype(np.uint8))
    return Corpus(data=data, files=1, fingerprint="x")


def test_the_standard_library_is_large_and_its_fingerprint_repeats():
    first = standard_library()
    standard_library.cache_clear()
    again = standard_library()
    assert first.fingerprint == again.fingerprint
    assert len(first.data) > 5_000_000, sys.version
    assert b"def " in bytes(first.data[:100_000].numpy())


def test_a_batch_depends_on_seed_and_step_alone():
    one = Batches(small(), batch=5, context=16, seed=3)
    for step in (1, 2, 50):
        one(step)
    resumed = Batches(small(), batch=5, context=16, seed=3)
    for got, wanted in zip(resumed(51), one(51), strict=True):
        assert torch.equal(got, wanted)
    assert not torch.equal(Batches(small(), batch=5, context=16, seed=4)(51)[0], one(51)[0])


def test_targets_are_the_inputs_one_byte_later():
    inputs, targets = Batches(small(), batch=7, context=16, seed=0)(9)
    assert inputs.shape == targets.shape == (7, 16)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


def test_start_positions_cover_the_corpus_more_evenly_than_chance():
    corpus = Corpus(data=torch.arange(250).repeat_interleave(400).to(torch.uint8), files=1, fingerprint="x")
    inputs, _ = Batches(corpus, batch=50, context=4, seed=1)(7)
    # Fifty draws by chance fill about 32 of fifty equal bins; a low-discrepancy sequence nearly all.
    assert len(set((inputs[:, 0] // 5).tolist())) >= 40


def test_no_start_repeats_before_the_corpus_is_used_up():
    batches = Batches(small(997 + 8), batch=97, context=8, seed=5)
    windows = {tuple(row) for step in range(1, 11) for row in batches(step)[0].tolist()}
    assert len(windows) == 970


def test_the_data_fault_permutes_the_bytes_from_its_step_on():
    healthy = Batches(small(), batch=5, context=64, seed=2)
    faulted = Batches(small(), batch=5, context=64, seed=2, shuffled_from=4)
    assert torch.equal(healthy(3)[0], faulted(3)[0])
    before, after = healthy(4)[0].flatten(), faulted(4)[0].flatten()
    assert (before != after).float().mean() > 0.9
    pairs = set(zip(before.tolist(), after.tolist(), strict=True))
    assert len(pairs) == len(set(before.tolist())) == len(set(after.tolist()))


@pytest.mark.parametrize(("batch", "context"), [(0, 4), (4, 0), (1, 20_000)])
def test_impossible_batches_are_refused(batch, context):
    with pytest.raises(ValueError):
        Batches(small(), batch=batch, context=context, seed=0)


def test_steps_count_from_one():
    with pytest.raises(ValueError, match="1-based"):
        Batches(small(), batch=1, context=4, seed=0)(0)
