"""CKA against a slow float64 specification, closed forms, published values, and what goes wrong elsewhere."""

import itertools
import sys
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from helpers.cka import MinibatchCKA, cka, compare, deconfound, gram, hsic, measure
from helpers.grams import centre

# --- the specification, written for clarity and not for speed -------------------------------------


def slow_hsic(K, L, unbiased=True):
    """HSIC from its definitions: the trace, or Song's three terms (2012, equation 5) in float64."""
    n = len(K)
    if not unbiased:
        H = np.eye(n) - np.ones((n, n)) / n
        return np.trace(K @ H @ L @ H) / (n - 1) ** 2
    K, L, one = K - np.diag(np.diag(K)), L - np.diag(np.diag(L)), np.ones(n)
    product = (one @ K @ one) * (one @ L @ one) / ((n - 1) * (n - 2))
    return (np.trace(K @ L) + product - 2 * one @ K @ L @ one / (n - 2)) / (n * (n - 3))


def slow_cka(X, Y, unbiased=True):
    X, Y = (np.asarray(Z, dtype=np.float64).reshape(len(Z), -1) for Z in (X, Y))
    X, Y = X - X.mean(0), Y - Y.mean(0)
    K, L = X @ X.T, Y @ Y.T
    return slow_hsic(K, L, unbiased) / np.sqrt(slow_hsic(K, K, unbiased) * slow_hsic(L, L, unbiased))


def demo():
    np.random.seed(1337)
    X = np.random.randn(100, 10)
    return X, np.random.randn(100, 10) + X


def related(n=24, d=50, seed=0):
    """Two float64 feature sets that have about half their variance in common."""
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, d))
    return X, X[:, : d // 2] + rng.normal(size=(n, d // 2))


# --- published values and closed forms ------------------------------------------------------------


def test_published_demo_values():
    X, Y = demo()
    assert float(cka(X, Y, unbiased=False)) == pytest.approx(0.55761, abs=1e-5)
    assert float(cka(X, Y)) == pytest.approx(0.51346, abs=1e-5)
    assert float(cka(X, Y, unbiased=False, kernel="rbf")) == pytest.approx(0.65483, abs=1e-5)
    assert float(hsic(gram(X), gram(Y))) == pytest.approx(9.895956, abs=1e-6)


def hadamard(n):
    H = np.ones((1, 1))
    while len(H) < n:
        H = np.block([[H, H], [H, -H]])
    return H[:, 1:]  # without the constant column


@pytest.mark.parametrize(("p", "q", "s"), [(3, 5, 2), (8, 8, 8), (4, 6, 0), (1, 1, 0), (10, 3, 3)])
def test_orthogonal_designs(p, q, s):
    n, H = 16, hadamard(16)
    X, Y = H[:, :p], H[:, p - s : p - s + q]
    assert float(cka(X, Y, unbiased=False)) == pytest.approx(s / np.sqrt(p * q), abs=1e-12)
    expected = n**2 * (s - p * q / (n - 1)) / (n * (n - 3))
    assert float(hsic(gram(X), gram(Y))) == pytest.approx(expected, abs=1e-10)


def test_independent_features_biased_far_from_zero_unbiased_near_it():
    n, d = 64, 4096
    X, Y = torch.randn(2, n, d, generator=torch.Generator().manual_seed(0))
    assert float(cka(X, Y, unbiased=False)) == pytest.approx(np.sqrt(d * d / ((d + n) * (d + n))), abs=0.005)
    assert abs(float(cka(X, Y))) < 0.05


def test_unbiased_values_are_negative_half_the_time_and_are_kept():
    g = torch.Generator().manual_seed(0)
    values = torch.stack([cka(*torch.randn(2, 8, 3, generator=g)) for _ in range(300)])
    assert 0.3 < float((values < 0).double().mean()) < 0.7
    raw = [float(hsic(*map(gram, torch.randn(2, 8, 3, generator=g)))) for _ in range(300)]
    assert abs(np.mean(raw)) < 3 * np.std(raw) / np.sqrt(len(raw))


@pytest.mark.parametrize("size", [4, 5])
def test_mean_of_hsic_over_all_subsets_is_the_full_batch_value(size):
    X, Y = related(n=8, d=6)
    K, L = X @ X.T, Y @ Y.T
    subsets = [list(c) for c in itertools.combinations(range(8), size)]
    mean = np.mean([float(hsic(K[np.ix_(c, c)], L[np.ix_(c, c)])) for c in subsets])
    assert mean == pytest.approx(float(hsic(K, L)), rel=1e-10)


# --- properties -----------------------------------------------------------------------------------

seeds, sizes = st.integers(0, 10_000), st.integers(4, 20)


@given(seeds, sizes, st.integers(1, 30), st.integers(1, 30), st.booleans())
def test_equals_the_specification(seed, n, p, q, unbiased):
    rng = np.random.default_rng(seed)
    X, Y = rng.normal(size=(n, p)), rng.normal(size=(n, q))
    Y[:, 0] += X[:, 0]
    K, L = X @ X.T, Y @ Y.T
    assert float(hsic(K, L, unbiased)) == pytest.approx(slow_hsic(K, L, unbiased), rel=1e-9, abs=1e-9)
    with np.errstate(invalid="ignore", divide="ignore"):
        assert float(cka(X, Y, unbiased)) == pytest.approx(slow_cka(X, Y, unbiased), rel=1e-6, abs=1e-6)


@given(seeds, st.booleans(), st.sampled_from(["linear", "rbf"]))
def test_invariant_to_rotation_scale_shift_and_order_of_images(seed, unbiased, kernel):
    X, Y = related(seed=seed)
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(X.shape[1], X.shape[1])))[0]
    order = rng.permutation(len(X))
    base = float(cka(X, Y, unbiased, kernel))
    for X2, Y2 in [(X @ rotation, Y), (X * 7e3, Y * -2e-4), (X + 50, Y - 3), (X[order], Y[order])]:
        assert float(cka(X2, Y2, unbiased, kernel)) == pytest.approx(base, abs=1e-9)
    assert float(cka(Y, X, unbiased, kernel)) == pytest.approx(base, abs=1e-12)
    assert float(cka(X, X, unbiased, kernel)) == pytest.approx(1, abs=1e-12)


def test_not_invariant_to_every_invertible_map():
    X, Y = related()
    stretch = np.diag(np.logspace(-2, 2, X.shape[1]))
    assert abs(float(cka(X @ stretch, Y)) - float(cka(X, Y))) > 0.1


@given(seeds, st.floats(-1e3, 1e3), st.booleans())
def test_centring_is_idempotent_and_blind_to_row_offsets(seed, offset, unbiased):
    rng = np.random.default_rng(seed)
    X, a = rng.normal(size=(9, 4)), rng.normal(size=9)
    K = torch.tensor(X @ X.T)
    C = centre(K, unbiased)
    assert torch.allclose(centre(C, unbiased), C, atol=1e-12)
    assert torch.allclose(centre(K + torch.tensor(offset * (a[:, None] + a)), unbiased), C, atol=1e-9)
    assert torch.allclose(C.sum(0), torch.zeros(9, dtype=C.dtype), atol=1e-11)


# --- numbers that go wrong elsewhere --------------------------------------------------------------


@pytest.mark.parametrize("unbiased", [True, False])
@pytest.mark.parametrize(
    ("shift", "scale", "tolerance"),
    [(0, 1, 1e-6), (10, 1, 1e-5), (1000, 1, 1e-3), (0, 1e-6, 1e-6), (0, 1e6, 1e-6), (0, 1e-20, 1e-6),
     (0, 1e18, 1e-6)],
)
def test_float32_shifted_and_scaled(shift, scale, tolerance, unbiased):
    X, Y = related(n=64, d=2000)
    given_x = torch.tensor((X + shift) * scale, dtype=torch.float32)
    value = float(cka(given_x, torch.tensor(Y, dtype=torch.float32), unbiased))
    assert value == pytest.approx(slow_cka(X, Y, unbiased), abs=tolerance)
    exact = slow_cka(given_x.double().numpy(), Y.astype(np.float32), unbiased)  # of the very numbers given
    assert value == pytest.approx(exact, abs=1e-5)


@pytest.mark.parametrize(
    ("dtype", "scale"), [(torch.float16, 1e4), (torch.bfloat16, 1e30), (torch.float16, 1e-4)]
)
def test_half_precision_whose_squares_overflow(dtype, scale):
    X, Y = related(n=32, d=400)
    half = (torch.tensor(X) * scale).to(dtype)
    assert float(cka(half, Y)) == pytest.approx(slow_cka(half.double().numpy(), Y), abs=1e-5)


def test_integers_numpy_lists_and_vectors_are_features_too():
    X = np.arange(12).reshape(6, 2) ** 2
    expected = slow_cka(X, X[:, :1])
    for given_x in (X, torch.tensor(X), X.tolist(), torch.tensor(X, dtype=torch.uint8)):
        assert float(cka(given_x, X[:, 0])) == pytest.approx(expected, abs=1e-9)


def test_layout_in_memory_does_not_matter():
    x = torch.randn(8, 5, 6, 7)
    last = x.to(memory_format=torch.channels_last)
    assert torch.allclose(gram(x), gram(last), atol=1e-4)
    assert torch.allclose(gram(x), gram(x.flatten(1)), atol=1e-4)
    assert torch.allclose(gram(x.mT), gram(x), atol=1e-4)


@pytest.mark.parametrize("value", [0.0, 0.1, 1e6, -3.3e-9])
@pytest.mark.parametrize("n", [4, 33, 500])
def test_constant_features_give_nan_and_say_so(value, n):
    constant = torch.full((n, 3000), value)
    with pytest.warns(UserWarning, match="do not differ"):
        assert cka(constant, torch.randn(n, 3)).isnan()
    with pytest.warns(UserWarning, match="do not differ"):
        assert cka(torch.randn(n, 3), constant, unbiased=False).isnan()


def test_one_odd_image_has_no_unbiased_similarity():
    X = torch.zeros(10, 7)
    X[3] = torch.randn(7)
    with pytest.warns(UserWarning):
        assert cka(X, torch.randn(10, 5)).isnan()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_features_that_are_not_finite_are_refused(bad):
    X = torch.randn(6, 3)
    X[2, 1] = bad
    with pytest.raises(ValueError, match="NaN or infinite"):
        cka(X, torch.randn(6, 3))


@pytest.mark.parametrize("n", [0, 1, 3])
def test_too_few_images(n):
    with pytest.raises(ValueError, match="at least 4|must be real"):
        cka(torch.randn(n, 5), torch.randn(n, 5))


def test_wrong_shapes_and_kernels():
    with pytest.raises(ValueError, match="8 images and Y has 9"):
        cka(torch.randn(8, 5), torch.randn(9, 5))
    with pytest.raises(ValueError, match=r"gram\(features\)"):
        hsic(torch.randn(8, 5), torch.randn(8, 5))
    with pytest.raises(ValueError, match="'cosine'"):
        cka(torch.randn(8, 5), torch.randn(8, 5), kernel="cosine")
    with pytest.raises(ValueError, match="do not belong together"):
        MinibatchCKA().update(torch.randn(2, 8, 8), torch.randn(2, 9, 9))
    with pytest.raises(ValueError, match="no batch"):
        MinibatchCKA().matrix()


def test_rbf_bandwidth_is_a_fraction_of_the_median_distance():
    X = np.random.default_rng(0).normal(size=(20, 5))
    squares = ((X[:, None] - X) ** 2).sum(-1)
    expected = np.exp(-squares / (2 * 0.8**2 * np.median(squares)))
    assert torch.allclose(gram(X, "rbf", 0.8), torch.tensor(expected), atol=1e-10)
    assert torch.allclose(gram(X * 1e4, "rbf", 0.8), torch.tensor(expected), atol=1e-9)


# --- batches --------------------------------------------------------------------------------------


def batches_of_grams(sizes, layers=3, seed=0):
    rng = np.random.default_rng(seed)
    for n in sizes:
        base = rng.normal(size=(n, 10))
        yield [base @ rng.normal(size=(10, 12)) + rng.normal(size=(n, 12)) for _ in range(layers)]


def accumulate(sizes, unbiased=True, seed=0):
    total = MinibatchCKA(unbiased)
    for features in batches_of_grams(sizes, seed=seed):
        total.update([gram(X) for X in features])
    return total


@pytest.mark.parametrize("unbiased", [True, False])
def test_minibatches_average_hsic_and_take_the_ratio_last(unbiased):
    sizes = [8, 8, 5]
    mean = np.zeros((3, 3))
    for features in batches_of_grams(sizes):
        K = [X @ X.T for X in features]
        mean += len(features[0]) * np.array([[slow_hsic(a, b, unbiased) for b in K] for a in K])
    scale = np.sqrt(np.diag(mean))
    matrix = accumulate(sizes, unbiased).matrix()
    assert matrix.dtype == torch.float64
    assert np.allclose(matrix, mean / np.outer(scale, scale), atol=1e-10)


def test_merge_is_the_same_as_one_run_and_refuses_strangers():
    whole, part = accumulate([6, 7]), accumulate([6, 7])
    part.merge(accumulate([9], seed=5))
    features = next(batches_of_grams([9], seed=5))
    whole.update([gram(X) for X in features])
    assert torch.equal(part.matrix(), whole.matrix())
    with pytest.raises(ValueError, match="biased"):
        part.merge(accumulate([9], unbiased=False))
    other = MinibatchCKA()
    other.update([gram(features[0])])
    with pytest.raises(ValueError, match="cannot merge"):
        part.merge(other)


def shared_over_processes(rank, folder):
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    own = accumulate([6], seed=rank)
    own.all_reduce()
    torch.save(own.matrix(), f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def test_all_reduce_gives_every_process_the_whole(tmp_path):
    method = "fork" if sys.platform == "linux" else "spawn"  # spawning imports everything anew
    torch.multiprocessing.start_processes(shared_over_processes, (str(tmp_path),), 2, start_method=method)
    whole = accumulate([6], seed=0)
    whole.merge(accumulate([6], seed=1))
    for rank in (0, 1):
        assert torch.equal(torch.load(tmp_path / f"{rank}.pt", weights_only=True), whole.matrix())


# --- compare --------------------------------------------------------------------------------------


class Net(nn.Module):
    """Layers that run in another order than they are registered in, and an in-place activation."""

    def __init__(self, width=6, seed=0, dead=False):
        super().__init__()
        torch.manual_seed(seed)
        self.last = nn.Conv2d(width, width, 3, padding=1)
        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.act = nn.ReLU(inplace=True)
        self.dead = nn.Conv2d(width, width, 1)
        if dead:
            nn.init.zeros_(self.dead.weight)

    def forward(self, x):
        x = self.act(self.first(x))
        return self.last(x) + self.dead(x)


def images(n=40, seed=0):
    return torch.rand(n, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


LAYERS = ["first", "last"]


def by_hand(x_model, y_model, batches, unbiased=True):
    """CKA of `first` and `last` of two networks, with nothing of the project's in it."""
    mean, xx, yy = np.zeros((2, 2)), np.zeros(2), np.zeros(2)
    for batch in batches:
        K, L = [], []
        for model, out in ((x_model, K), (y_model, L)):
            with torch.no_grad():
                first = model.first(batch)
                for features in (first, model.last(first.relu())):
                    features = features.flatten(1).double().numpy()
                    out.append((features - features.mean(0)) @ (features - features.mean(0)).T)
        mean += len(batch) * np.array([[slow_hsic(k, m, unbiased) for m in L] for k in K])
        xx += len(batch) * np.array([slow_hsic(k, k, unbiased) for k in K])
        yy += len(batch) * np.array([slow_hsic(m, m, unbiased) for m in L])
    return mean / np.sqrt(np.outer(xx, yy))


@pytest.mark.parametrize("unbiased", [True, False])
def test_compare_equals_the_same_done_by_hand(unbiased):
    a, b, batches = Net(), Net(9, seed=1), images().split(16)
    result = compare(a, b, batches, LAYERS, LAYERS, unbiased)
    assert (result.rows, result.columns, result.n_images) == (LAYERS, LAYERS, 40)
    assert result.values.dtype == torch.float64
    assert np.allclose(result.values, by_hand(a, b, batches, unbiased), atol=1e-5)


def test_a_model_with_itself_runs_once_and_has_a_diagonal_of_one():
    model, calls = Net(), []
    handle = model.register_forward_hook(lambda *_: calls.append(1))
    result = compare(model, model, images().split(20), LAYERS, LAYERS)
    assert len(calls) == 2
    assert torch.allclose(result.values.diagonal(), torch.ones(2, dtype=torch.float64))
    assert torch.allclose(result.values, result.values.T)
    other = compare(model, model, images().split(20), ["first"], ["last", "first"])
    assert torch.allclose(other.values[0], result.values[0].flip(0))
    handle.remove()


def test_default_rows_are_in_the_order_of_execution():
    result = compare(Net(), Net(seed=1), images(8))
    assert result.rows == ["first", "act", "last", "dead"]


def test_both_models_see_the_same_batch_of_a_shuffled_loader():
    def shuffled():
        for _ in range(3):
            yield torch.rand(16, 3, 8, 8)

    class Loader:
        def __iter__(self):
            return shuffled()

    a, twin = Net(), Net()
    diagonal = compare(a, twin, Loader(), LAYERS, LAYERS).values.diagonal()
    assert torch.allclose(diagonal, torch.ones(2).double())


def test_a_dead_layer_is_named_and_touches_nothing_else():
    model, clean = Net(dead=True), Net()
    with pytest.warns(UserWarning, match=r"\['dead'\] do not differ"):
        result = compare(model, clean, images(), ["first", "dead", "last"], LAYERS)
    assert result.values[1].isnan().all() and result.values[[0, 2]].isfinite().all()
    expected = compare(model, clean, images(), LAYERS, LAYERS)
    assert torch.equal(result.values[[0, 2]], expected.values)


def test_a_layer_that_overflows_is_named_and_touches_nothing_else():
    model = Net()
    nn.init.constant_(model.dead.weight, float("inf"))
    with pytest.warns(UserWarning, match=r"\['dead'\] hold NaN or infinite"):
        result = compare(model, model, images(), ["first", "dead"], ["first", "dead"])
    assert result.values[0, 0] == pytest.approx(1) and result.values.isnan().sum() == 3


def test_batches_that_are_too_small():
    model = Net()
    with pytest.warns(UserWarning, match=r"batches of \[3\] images were left out"):
        result = compare(model, model, images(19).split(8), LAYERS, LAYERS)
    assert result.n_images == 16
    assert torch.equal(result.values, compare(model, model, images(19)[:16].split(8), LAYERS, LAYERS).values)
    with pytest.raises(ValueError, match=r"no batch had the 4 images .* \[3, 3\]"):
        compare(model, model, images(6).split(3), LAYERS, LAYERS)
    with pytest.raises(ValueError, match="empty"):
        compare(model, model, [], LAYERS, LAYERS)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert compare(model, model, images(6).split(3), LAYERS, LAYERS, unbiased=False).n_images == 6


def test_batch_size_changes_unbiased_values_little_and_biased_ones_much():
    a, b, x = Net(), Net(9, seed=1), images(256)
    for unbiased, least, most in ((True, 0, 0.1), (False, 0.1, 1)):
        whole, parts = (compare(a, b, g, LAYERS, LAYERS, unbiased).values for g in (x, x.split(8)))
        assert least <= float((whole - parts).abs().max()) < most


def test_shuffled_images_have_nothing_in_common():
    model, x = Net(), images(400)
    result = compare(model, model, x.split(100), LAYERS, LAYERS, permute_y=1)
    assert float(result.values.abs().max()) < 0.1
    again = compare(model, model, x.split(100), LAYERS, LAYERS, permute_y=1)
    assert torch.equal(result.values, again.values)


def test_transforms_and_different_inputs():
    a, b, x = Net(), Net(), images()
    plain = compare(a, b, x, LAYERS, LAYERS)
    transforms = (lambda v: v / 255, lambda v: crop(v) / 255)
    scaled = compare(a, b, x * 255, LAYERS, LAYERS, transforms=transforms)
    cropped = compare(a, b, x, LAYERS, LAYERS, transforms=(None, crop))
    assert torch.allclose(scaled.values, cropped.values, atol=1e-5)
    assert not torch.allclose(scaled.values, plain.values, atol=1e-2)


def crop(x):
    return x[..., :4, :4]


def test_deconfounding_removes_what_the_input_explains_and_only_that():
    rng = np.random.default_rng(0)
    Z, A, B = (rng.normal(size=(60, d)) for d in (8, 200, 200))
    K0, KA, KB = gram(Z), gram(A) / 200, gram(B) / 200
    mixed_a, mixed_b = KA + K0, KB + 3 * K0
    before = hsic(mixed_a, mixed_b) / (hsic(mixed_a, mixed_a) * hsic(mixed_b, mixed_b)).sqrt()
    a, b = deconfound(mixed_a, K0), deconfound(mixed_b, K0)
    after = hsic(a, b) / (hsic(a, a) * hsic(b, b)).sqrt()
    assert float(before) > 0.9 and abs(float(after)) < 0.1
    assert abs(float(hsic(a, K0))) < 1e-12
    assert float(deconfound(2 * K0, K0).abs().max()) == 0
    stacked = deconfound(torch.stack([mixed_a, mixed_b]), K0)
    assert torch.allclose(stacked[1], b)


def test_compare_with_the_input_regressed_out():
    model, other, x = Net(), Net(seed=3), images(64)
    plain, pure = (compare(model, other, x.split(32), LAYERS, LAYERS, deconfound=d) for d in (False, True))
    assert float(pure.values.mean()) < float(plain.values.mean()) - 0.1
    total = MinibatchCKA()
    for batch in x.split(32):
        with torch.no_grad():
            K = [deconfound(gram(m.first(batch)), gram(batch)) for m in (model, other)]
        total.update([K[0]], [K[1]])
    assert float(total.matrix()) == pytest.approx(float(pure.values[0, 0]), abs=1e-6)


def test_intervals_cover_the_truth_and_need_batches():
    a, b = Net(), Net(9, seed=1)
    truth = compare(a, b, images(4000, seed=99).split(400), LAYERS, LAYERS).values[0, 1]
    hits = 0
    for seed in range(20):
        result = compare(a, b, images(320, seed).split(16), LAYERS, LAYERS)
        low, high = result.interval(lambda m: m[0, 1], n=200)
        assert low < high
        hits += low <= float(truth) <= high
    assert hits >= 15
    draws = result.bootstrap(lambda m: m[0, 1], n=50, seed=3)
    assert torch.equal(draws, result.bootstrap(lambda m: m[0, 1], n=50, seed=3))
    with pytest.raises(ValueError, match="at least 2 batches"):
        compare(a, b, images(16), LAYERS, LAYERS).interval(torch.mean)


def test_measured_differences_are_paired():
    a, b, pixels = Net(), Net(9, seed=1), images(320, 5).split(32)
    first, second = compare(a, b, pixels, LAYERS, LAYERS), compare(a, a, pixels, LAYERS, LAYERS)
    value, (low, high) = measure(lambda m: m[0, 1], first)
    assert value == float(first.values[0, 1])
    assert (low, high) == pytest.approx(first.interval(lambda m: m[0, 1]))
    assert measure(lambda m, same: (m - same)[0, 1], first, first) == (0, (0, 0))  # the same batches in each
    value, (low, high) = measure(lambda m, n: m[0, 1] - n[0, 1], first, second)
    assert low <= value <= high and value == pytest.approx(float(first.values[0, 1] - second.values[0, 1]))
    with pytest.raises(ValueError, match="same batches"):
        measure(lambda m, n: m[0, 1], first, compare(a, b, pixels[:5], LAYERS, LAYERS))


@pytest.mark.parametrize(
    ("names", "message"), [([], "no layers"), (["last", "last"], "given twice"), ("lst", "nearest are .*'last'")]
)
def test_bad_layer_names_on_either_side(names, message):
    model = Net()
    for sides in ((names, LAYERS), (LAYERS, names)):
        for other in (model, Net(seed=1)):
            with pytest.raises(ValueError, match=message):
                compare(model, other, images(8), *sides)
    assert compare(model, model, images(8), "last", "first").values.shape == (1, 1)


def test_wrapped_models_in_train_mode_compare_like_plain_ones():
    plain = compare(Net(), Net(seed=1), images(), LAYERS, LAYERS)
    wrapped = nn.DataParallel(Net()).train(), torch.compile(Net(seed=1), backend="eager").train()
    result = compare(*wrapped, images(), LAYERS, LAYERS)
    assert torch.equal(result.values, plain.values)
    assert wrapped[0].training and wrapped[1].training


def test_printing_shows_every_layer():
    text = repr(compare(Net(), Net(), images(8), LAYERS, LAYERS))
    assert "8 images" in text and all(name in text for name in LAYERS) and "1.00" in text


def test_windows_and_sequence_first_outputs_keep_images_apart():
    class Windows(nn.Module):
        def __init__(self):
            super().__init__()
            self.windows, self.sequence, self.plain = (nn.Identity() for _ in range(3))

        def forward(self, x):  # x (n, 3, 8, 8)
            tokens = x.flatten(2)  # (n, 3, 64)
            windows, sequence = tokens.reshape(-1, 1, 64), tokens.transpose(0, 1)
            return self.plain(tokens), self.windows(windows), self.sequence(sequence)

    result = compare(Windows(), Windows(), images(16), ["windows", "sequence", "plain"], ["plain"])
    assert torch.allclose(result.values, torch.ones(3, 1, dtype=torch.float64))


# ---------------------------------------------------------------- fast


def test_fast_is_near_and_leaves_the_model_as_it_was():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2304, 8))
    images = torch.randn(32, 3, 16, 16)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    slow, fast = (compare(model, model, images, fast=fast) for fast in (False, True))
    assert slow.rows == fast.rows and float((slow.values - fast.values).abs().max()) < 5e-3
    assert torch.allclose(fast.values.diagonal(), torch.ones(len(fast.rows), dtype=torch.float64))
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]) and value.dtype == torch.float32
        assert value.stride() == before[name].stride()
    assert torch.equal(compare(model, model, images).values, slow.values)  # and the next run is exact again


def test_fast_falls_back_where_there_are_no_instructions(monkeypatch):
    monkeypatch.setattr("helpers.record.has_bfloat16", lambda device: False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))
    images = torch.randn(16, 3, 12, 12)
    slow, fast = (compare(model, model, images, fast=fast).values for fast in (False, True))
    assert float((slow - fast).abs().max()) < 1e-6


def test_products_are_exact_inside_the_users_own_autocast():
    X = torch.randn(16, 500, generator=torch.Generator().manual_seed(0)) + 0.5
    exact = gram(X.double())
    with torch.autocast("cpu", torch.bfloat16):
        assert float((gram(X) - exact).abs().max() / exact.abs().max()) < 1e-5


@pytest.mark.parametrize("chunk", [2**22, 2**17])
@pytest.mark.parametrize("mean", [0, 1, 3, 5, 6, 10, 100, 1000])  # on both sides of where features are centred first
def test_any_mean_and_a_mean_in_a_few_features_only(mean, chunk, monkeypatch):
    monkeypatch.setattr("helpers.grams.CHUNK", chunk)
    generator = torch.Generator().manual_seed(0)
    X = torch.randn(32, 40_000, generator=generator, dtype=torch.float64)
    X[:, 20_000:30_000] += mean * torch.randn(10_000, generator=generator, dtype=torch.float64)
    Y = X[:, ::2] + torch.randn(32, 20_000, generator=generator, dtype=torch.float64)
    single, double = cka(X.float(), Y.float()), cka(X, Y)
    assert abs(float(single - double)) < 2e-4


@pytest.mark.parametrize("shape", [(2, 8, 8), (8,), (7, 7), (8, 7)])
def test_deconfound_refuses_inputs_that_do_not_fit(shape):
    K = gram(torch.randn(8, 20, generator=torch.Generator().manual_seed(0)))
    with pytest.raises(ValueError, match="K_input must be one"):
        deconfound(K, torch.zeros(shape))
