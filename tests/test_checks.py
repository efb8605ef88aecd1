"""Checkers against answers as students write them: right ones in several styles, wrong ones with the right hint."""

import contextlib
import io
import itertools

import numpy as np
import pytest
import torch

from helpers import attention, checks, grams, location, probes, receptive
from helpers.cka import MinibatchCKA
from helpers.cka import cka as course_cka

RIGHT, WRONG = [], []


def right(name):
    return lambda f: RIGHT.append(pytest.param(name, f, id=f"{name}-{f.__name__}")) or f


def wrong(name, fragment):
    return lambda f: WRONG.append(pytest.param(name, f, fragment, id=f"{name}-{f.__name__}")) or f


@pytest.mark.parametrize("name, function", RIGHT)
def test_right_answers_pass(name, function):
    for seed in (0, 1, 20261130):
        assert getattr(checks, name).hint(function, seed) == ""


@pytest.mark.parametrize("name, function, fragment", WRONG)
def test_wrong_answers_are_named(name, function, fragment):
    for seed in (0, 20261130):
        hint = getattr(checks, name).hint(function, seed)
        assert fragment in hint, hint


def test_each_checker_has_five_wrong_and_three_right_answers():
    for name in checks.__all__:
        assert sum(p.values[0] == name for p in WRONG) >= 5, name
        assert sum(p.values[0] == name for p in RIGHT) >= 3, name


@pytest.mark.parametrize("name", checks.__all__)
def test_the_specification_keeps_its_own_rules_and_fits_no_mistake(name):
    check = getattr(checks, name)
    assert check.hint(check.specification) == ""
    for hint, change in check.keeps.items():
        for what, args in check.cases(np.random.default_rng(3)):
            before, after = check.specification(*args), check.specification(*change(*args))
            np.testing.assert_allclose(after, before, rtol=1e-5, atol=1e-8, err_msg=f"{hint}: {what}")


def known_mistakes():
    for name in checks.__all__:
        for hint, functions in getattr(checks, name).mistakes.items():
            for function in functions if isinstance(functions, tuple) else (functions,):
                yield name, hint, function


def test_every_known_mistake_is_recognised():
    """On other cases than the exercise's own, so that no two mistakes look alike by chance."""
    def plain(value):
        return [plain(v) for v in value] if isinstance(value, list) else (
            value.numpy().astype(float if value.is_floating_point() else int) if torch.is_tensor(value) else value)

    with np.errstate(all="ignore"):
        for name, hint, mistake in known_mistakes():
            found = getattr(checks, name).hint(lambda *args, m=mistake: m(*map(plain, args)), seed=7)
            assert found == hint, (name, hint, found)


# What a function may do that has nothing to do with the exercise

def raises(*args):
    raise KeyError("blocks.3")


def changes(K, L):
    K.fill_diagonal_(0) if torch.is_tensor(K) else np.fill_diagonal(K, 0)
    return (K * L).sum()


CALLS = itertools.count()
ODD = [
    (raises, "raises KeyError"), (lambda *a: None, "return missing"), (changes, "changes its arguments"),
    (lambda K: 1.0, "cannot be called as hsic(K, L)"), (lambda K, L: "0.3", "no array of real numbers"),
    (lambda K, L: torch.nan, "NaN"), (lambda K, L: np.array([1.0, np.inf]), "shape (2,)"), (lambda K, L: {}, "no array"),
    (lambda K, L: torch.tensor(1j), "no array of real"), (lambda K, L: [[1, 2], [3]], "no array"),
    (lambda K, L: K, "returns the shape"), (lambda K, L: 7, "values differ in every case"), (3.2, "pass the function itself"),
    (lambda K, L: checks.hsic.specification, "no array"), (lambda K, L: True, "values differ"),
    (lambda K, L: -grams.hsic(K, L, unbiased=False), "sign"), (lambda K, L: 3 * grams.hsic(K, L, unbiased=False), "constant"),
    (lambda K, L: grams.hsic(K, L, unbiased=False) ** 2, "root is missing"),
    (lambda K, L: grams.hsic(K, L, unbiased=False) if len(K) % 2 else grams.hsic(K, L, unbiased=False) * 1.2, "right in"),
    (lambda K, L: grams.hsic(K, L, unbiased=False) + float(K[0, 0]), "not centred"),
    (lambda K, L: grams.hsic(K, L, unbiased=False) * np.random.default_rng().uniform(0.5, 2), "another answer when"),
    (lambda K, L: float(next(CALLS)), "another answer when"),
]


@pytest.mark.parametrize("function, fragment", ODD)
def test_functions_that_misbehave(function, fragment):
    assert fragment in checks.hsic.hint(function)


@pytest.mark.parametrize("name", checks.__all__)
@pytest.mark.parametrize("function", [raises, lambda *a: None, lambda *a: torch.nan, lambda *a: "", lambda *a: torch.zeros(3, 1, 2),
                                      lambda *a: a, lambda *a: a[0], lambda *a: 0, lambda: 1, object()])
def test_every_checker_survives_and_rejects(name, function):
    hint = getattr(checks, name).hint(function)
    assert hint and "Traceback" not in hint


def test_a_hint_never_shows_a_value_that_was_wanted():
    check = checks.hsic
    wanted = [float(check.specification(*args)) for _, args in check.cases(np.random.default_rng(0))]
    for function, _ in ODD:
        hint = check.hint(function)
        assert not any(f"{value:.3g}" in hint for value in wanted)


def test_prints_and_raises():
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert checks.centring(checks.centring.specification) is None
        checks.centring(lambda n: torch.eye(n))
    assert out.getvalue().startswith("passed: centring is right") and "not yet: this is the identity" in out.getvalue()
    with pytest.raises(AssertionError, match="identity"):
        checks.centring.require(lambda n: torch.eye(n))
    checks.centring.require(checks.centring.specification)


def test_checkers_leave_the_random_state_alone():
    np.random.seed(1)
    torch.manual_seed(1)
    before = np.random.rand(), torch.rand(1)
    np.random.seed(1)
    torch.manual_seed(1)
    checks.ridge.hint(lambda *a: None)
    assert (np.random.rand(), torch.rand(1)) == before


# The course's own functions are right

right("centred_gram")(grams.gram)
right("patch_distances")(attention.patch_distances)
right("radius")(receptive.radius)
right("sharpness")(location.sharpness)
right("cka")(course_cka)


@right("hsic")
def course_hsic(K, L):
    return grams.hsic(K, L, unbiased=False)


@right("hsic1")
def course_hsic1(K, L):
    return grams.hsic(K, L)


@right("cka_biased")
def course_cka_biased(X, Y):
    return course_cka(X, Y, unbiased=False)


@right("minibatch_cka")
def course_minibatch(batches_x, batches_y):
    total = MinibatchCKA()
    for X, Y in zip(batches_x, batches_y, strict=True):
        total.update(grams.gram(X)[None], grams.gram(Y)[None])
    return total.matrix()


@right("mean_distance")
def course_mean_distance(maps, distances):
    return attention.query_distances(maps, distances).mean((0, 2))


@right("ridge")
def course_ridge(X, y, Z, classes, l2):
    return probes.ridge(X, y, classes, l2)(Z)


# Tokens and depth

@right("unpatchify")
def by_permute(patches, grid, P):
    n, t, size = patches.shape
    x = patches.reshape(n, *grid, size // P**2, P, P)
    return x.permute(0, 3, 1, 4, 2, 5).reshape(n, -1, grid[0] * P, grid[1] * P)


@right("unpatchify")
def by_fold(patches, grid, P):
    return torch.nn.functional.fold(patches.transpose(1, 2), (grid[0] * P, grid[1] * P), P, stride=P)


@right("unpatchify")
def by_concatenation(patches, grid, P):
    tokens = np.asarray(patches).reshape(len(patches), *grid, -1, P, P)
    return [np.concatenate([np.concatenate(list(row), axis=2) for row in image], axis=1) for image in tokens]


def unpatchify_mistake(fragment, function, label):
    function.__name__ = label
    wrong("unpatchify", fragment)(function)


def permuted(order):
    return lambda x, g, P: x.reshape(len(x), *g, -1, P, P).permute(order).reshape(len(x), -1, g[0] * P, g[1] * P)


unpatchify_mistake("axes must be exchanged", lambda x, g, P: x.reshape(len(x), -1, g[0] * P, g[1] * P), "reshape_only")
unpatchify_mistake("within each patch", permuted((0, 3, 1, 5, 2, 4)), "turned_patches")
unpatchify_mistake("column by column", lambda x, g, P: by_permute(x.reshape(len(x), *g[::-1], -1).transpose(1, 2).flatten(1, 2), g, P), "column_major_tokens")
unpatchify_mistake("whole image is turned", lambda x, g, P: by_permute(x, g, P).mT, "turned_image")
unpatchify_mistake("within a token they come first", lambda x, g, P: by_permute(x.reshape(*x.shape[:2], P * P, -1).mT.flatten(2), g, P), "pixel_channels_last")
unpatchify_mistake("(n, c, H, W)", lambda x, g, P: by_permute(x, g, P).permute(0, 2, 3, 1), "image_channels_last")
unpatchify_mistake("shape", lambda x, g, P: x.reshape(len(x), *g, -1, P, P), "grid_kept")


@right("closest_depth")
def torch_argmax(matrix):
    return matrix.argmax(1) / (matrix.shape[1] - 1)


@right("closest_depth")
def lists(matrix):
    return [row.index(max(row)) / (len(row) - 1) for row in matrix.tolist()]


@right("closest_depth")
def linspace(matrix):
    return np.linspace(0, 1, np.shape(matrix)[1])[np.argsort(matrix, axis=1)[:, -1]]


def depth_mistake(fragment, function, label):
    function.__name__ = label
    wrong("closest_depth", fragment)(function)


depth_mistake("numbers of layers", lambda m: m.argmax(1), "indices")
depth_mistake("last layer must have depth 1", lambda m: m.argmax(1) / m.shape[1], "over_count")
depth_mistake("first layer must have depth 0", lambda m: (m.argmax(1) + 1) / m.shape[1], "from_one")
depth_mistake("depth of the other network", lambda m: m.argmax(1) / (len(m) - 1), "other_depth")
depth_mistake("for each row the closest", lambda m: m.argmax(0) / (m.shape[1] - 1), "columns")
depth_mistake("how similar", lambda m: m.max(1).values, "the_value")
depth_mistake("sign of a similarity", lambda m: m.abs().argmax(1) / (m.shape[1] - 1), "magnitude")
depth_mistake("weighted", lambda m: (m * torch.linspace(0, 1, m.shape[1])).sum(1) / m.sum(1), "centre_of_mass")


# Centring

@right("centring")
def torch_eye(n):
    return torch.eye(n) - torch.ones(n, n) / n


@right("centring")
def numpy_outer(n):
    one = np.ones(n)
    return np.eye(n) - np.outer(one, one) / n


@right("centring")
def nested_lists(n):
    return [[(i == j) - 1 / n for i in range(n)] for j in range(n)]


@wrong("centring", "sum over the images, not their mean")
def ones_not_divided(n):
    return torch.eye(n) - torch.ones(n, n)


@wrong("centring", "another: what does a row")
def n_minus_one(n):
    return torch.eye(n) - torch.ones(n, n) / (n - 1)


@wrong("centring", "averages")
def only_mean(n):
    return torch.full((n, n), 1 / n)


@wrong("centring", "sign")
def plus(n):
    return np.eye(n) + 1 / n


@wrong("centring", "identity")
def identity(n):
    return np.eye(n)


@wrong("centring", "only the diagonal")
def diagonal_only(n):
    H = torch.eye(n)
    for i in range(n):
        H[i, i] -= 1 / n
    return H


@wrong("centring", "shape")
def a_vector(n):
    return 1 - torch.ones(n) / n


@right("centred_gram")
def by_matrix(X):
    H = torch.eye(len(X)) - 1 / len(X)
    return H @ X @ X.T @ H


@right("centred_gram")
def by_einsum(X):
    X = np.asarray(X)
    X = X - X.mean(axis=0, keepdims=True)
    return np.einsum("ip,jp->ij", X, X)


@right("centred_gram")
def by_gram(X):
    K = X @ X.T
    return K - K.mean(0) - K.mean(1)[:, None] + K.mean()


@wrong("centred_gram", "not centred")
def raw_product(X):
    return torch.einsum("ip,jp->ij", X, X)


@wrong("centred_gram", "mean over images was to go")
def wrong_axis(X):
    X = X - X.mean(dim=1, keepdim=True)
    return X @ X.T


@wrong("centred_gram", "one mean of everything")
def grand_mean(X):
    X = X - X.mean()
    return X @ X.T


@wrong("centred_gram", "features with features")
def covariance(X):
    X = X - X.mean(0)
    return X.T @ X


@wrong("centred_gram", "one side only")
def left_only(X):
    return (torch.eye(len(X)) - 1 / len(X)) @ (X @ X.T)


@wrong("centred_gram", "standardised")
def standardise(X):
    X = (X - X.mean(0)) / X.std(0)
    return X @ X.T


@wrong("centred_gram", "cosine")
def cosine(X):
    X = torch.nn.functional.normalize(X - X.mean(0), dim=1)
    return X @ X.T


@wrong("centred_gram", "overall mean twice")
def forgot_plus(X):
    K = X @ X.T
    return K - K.mean(0, keepdim=True) - K.mean(1, keepdim=True)


# HSIC

def H(n):
    return torch.eye(n, dtype=torch.float64) - 1 / n


@right("hsic")
def trace_form(K, L):
    n = len(K)
    return torch.trace(K.double() @ H(n) @ L.double() @ H(n)) / (n - 1) ** 2


@right("hsic")
def numpy_vec(K, L):
    K, L = np.array(K), np.array(L)
    n = K.shape[0]
    C = np.eye(n) - np.ones((n, n)) / n
    return np.vdot(C @ K @ C, C @ L @ C) / (n - 1) ** 2


@right("hsic")
def loops(K, L):
    n, total = len(K), 0.0
    rows, mean = K.mean(1), K.mean()
    for i in range(n):
        for j in range(n):
            total += (K[i, j] - rows[i] - rows[j] + mean) * L[i, j]
    return total / (n - 1) ** 2


@wrong("hsic", "neither matrix was centred")
def no_centre(K, L):
    return torch.trace(K @ L) / (len(K) - 1) ** 2


@wrong("hsic", "only one side")
def once(K, L):
    h = H(len(K))
    return ((h @ K.double()) * (h @ L.double())).sum() / (len(K) - 1) ** 2


@wrong("hsic", "n²")
def n_squared(K, L):
    h = H(len(K))
    return torch.mean((h @ K.double() @ h) * (h @ L.double() @ h))


@wrong("hsic", "divisor of the unbiased")
def n_n_minus_3(K, L):
    n = len(K)
    return torch.trace(K.double() @ H(n) @ L.double() @ H(n)) / (n * (n - 3))


@wrong("hsic", "did not divide")
def no_division(K, L):
    return torch.trace(K.double() @ H(len(K)) @ L.double() @ H(len(K)))


@wrong("hsic", "only once")
def divided_once(K, L):
    return torch.trace(K.double() @ H(len(K)) @ L.double() @ H(len(K))) / (len(K) - 1)


@wrong("hsic", "sums, not means")
def bad_h(K, L):
    h = torch.eye(len(K)) - torch.ones(len(K), len(K))
    return torch.trace(K @ h @ L @ h) / (len(K) - 1) ** 2


@wrong("hsic", "its trace")
def sum_of_product(K, L):
    h = H(len(K))
    return (h @ K.double() @ h @ L.double() @ h).sum() / (len(K) - 1) ** 2


@wrong("hsic", "unbiased estimator; the biased")
def other_estimator(K, L):
    return grams.hsic(K, L)


@wrong("hsic", "ratio, CKA")
def normalised(K, L):
    def h0(A, B):
        return grams.hsic(A, B, unbiased=False)
    return h0(K, L) / (h0(K, K) * h0(L, L)) ** 0.5


@wrong("hsic", "entry-by-entry")
def star_for_at(K, L):
    h = H(len(K))
    return torch.trace((h @ K.double() @ h) * (h @ L.double() @ h)) / (len(K) - 1) ** 2


@wrong("hsic", "L plays no part")
def typo(K, L):
    return grams.hsic(K, K, unbiased=False)


# HSIC1

def terms(K, L):
    K, L = K.double().clone(), L.double().clone()
    K.fill_diagonal_(0), L.fill_diagonal_(0)
    n = len(K)
    return n, (K * L).sum(), K.sum() * L.sum() / (n - 1) / (n - 2), (K @ L).sum() / (n - 2)


@right("hsic1")
def song(K, L):
    n, a, b, c = terms(K, L)
    return (a + b - 2 * c) / (n * (n - 3))


@right("hsic1")
def szekely_numpy(K, L):
    def u_centre(G):
        G = np.array(G, dtype=np.float64)
        n = len(G)
        np.fill_diagonal(G, 0)
        means = G.sum(0) / (n - 2)
        means -= means.sum() / (2 * (n - 1))
        G = G - means[:, None] - means
        np.fill_diagonal(G, 0)
        return G
    n = len(K)
    return np.sum(u_centre(K) * u_centre(L)) / (n * (n - 3))


@right("hsic1")
def quadruples(K, L):
    """The mean over pairs, triples and quadruples of different images: slow, and by definition unbiased."""
    n = len(K)
    K, L = np.array(K, float), np.array(L, float)
    off = ~np.eye(n, dtype=bool)
    pair = (K * L)[off].sum() / (n * (n - 1))
    K, L = K * off, L * off
    triple = (K.sum(1) * L.sum(1) - (K * L).sum(1)).sum() / (n * (n - 1) * (n - 2))
    four = K.sum() * L.sum() - 4 * (K.sum(1) * L.sum(1)).sum() + 2 * (K * L).sum()
    return pair + four / (n * (n - 1) * (n - 2) * (n - 3)) - 2 * triple


@wrong("hsic1", "this is the biased")
def biased(K, L):
    return course_hsic(K, L)


@wrong("hsic1", "diagonal was not removed")
def with_diagonal(K, L):
    K, L, n = K.double(), L.double(), len(K)
    return (torch.trace(K @ L) + K.sum() * L.sum() / ((n - 1) * (n - 2)) - 2 * (K @ L).sum() / (n - 2)) / (n * (n - 3))


@wrong("hsic1", "a row was subtracted")
def broadcast_diagonal(K, L):
    return with_diagonal(K - torch.diag(K), L - torch.diag(L))


@wrong("hsic1", "n²")
def over_n_squared(K, L):
    n, a, b, c = terms(K, L)
    return (a + b - 2 * c) / n**2


@wrong("hsic1", "divisor of the biased")
def over_n_minus_1(K, L):
    n, a, b, c = terms(K, L)
    return (a + b - 2 * c) / (n - 1) ** 2


@wrong("hsic1", "last term lacks a factor")
def no_two(K, L):
    n, a, b, c = terms(K, L)
    return (a + b - c) / (n * (n - 3))


@wrong("hsic1", "wrong sign")
def plus_two(K, L):
    n, a, b, c = terms(K, L)
    return (a + b + 2 * c) / (n * (n - 3))


@wrong("hsic1", "total sums is missing")
def no_middle(K, L):
    n, a, b, c = terms(K, L)
    return (a - 2 * c) / (n * (n - 3))


@wrong("hsic1", "set to 0")
def clamped(K, L):
    return song(K, L).clamp(min=0)


@wrong("hsic1", "centring afterwards filled")
def zero_then_centre(K, L):
    h, n = H(len(K)), len(K)
    K, L = K.double() - torch.diag(K.double().diag()), L.double() - torch.diag(L.double().diag())
    return torch.trace(K @ h @ L @ h) / (n * (n - 3))


@wrong("hsic1", "removed after the centring")
def centre_then_zero(K, L):
    h, n = H(len(K)), len(K)
    K, L = h @ K.double() @ h, h @ L.double() @ h
    K.fill_diagonal_(0), L.fill_diagonal_(0)
    return (K * L).sum() / (n * (n - 3))


@wrong("hsic1", "removed from K only")
def one_diagonal(K, L):
    K = K.clone()
    K.fill_diagonal_(0)
    return with_diagonal(K, L)


def slip(fragment, label, a=1, b=1, c=2):
    def function(K, L):
        n, first, second, third = terms(K, L)
        scale = [f(n) if callable(f) else f for f in (a, b, c)]
        return (scale[0] * first + scale[1] * second - scale[2] * third) / (n * (n - 3))
    function.__name__ = label
    wrong("hsic1", fragment)(function)


slip("not divided by anything of its own", "no_middle_divisor", b=lambda n: (n - 1) * (n - 2))
slip("total sums has the wrong sign", "middle_minus", b=-1)
slip("divisor of the last term", "no_last_divisor", c=lambda n: 2 * (n - 2))


@wrong("hsic1", "not the entry-by-entry")
def star_in_the_last_term(K, L):
    n, a, b, _ = terms(K, L)
    return (a + b - 2 * a / (n - 2)) / (n * (n - 3))


# CKA

@right("cka")
def from_song(X, Y):
    K, L = X.double() @ X.double().T, Y.double() @ Y.double().T
    return song(K, L) / (song(K, K) * song(L, L)) ** 0.5


@right("cka")
def numpy_cka(X, Y):
    X, Y = (np.asarray(A, float) - np.asarray(A, float).mean(0) for A in (X, Y))
    h = [szekely_numpy(A @ A.T, B @ B.T) for A, B in ((X, Y), (X, X), (Y, Y))]
    return h[0] / np.sqrt(h[1] * h[2])


@right("cka_biased")
def kornblith(X, Y):
    X, Y = X - X.mean(0), Y - Y.mean(0)
    return (Y.T @ X).norm() ** 2 / ((X.T @ X).norm() * (Y.T @ Y).norm())


@right("cka_biased")
def cosine_of_grams(X, Y):
    K, L = by_einsum(X).ravel(), by_einsum(Y).ravel()
    return K @ L / np.linalg.norm(K) / np.linalg.norm(L)


def cka_of(h):
    def value(X, Y):
        K, L = X.double() @ X.double().T, Y.double() @ Y.double().T
        return h(K, L) / (h(K, K) * h(L, L)) ** 0.5
    return value


def cka_mistake(name, fragment, function, label):
    function.__name__ = label
    wrong(name, fragment)(function)


cka_mistake("cka", "biased estimator", cka_of(course_hsic), "biased_cka")
cka_mistake("cka_biased", "unbiased estimator", cka_of(song), "unbiased_cka")
cka_mistake("cka", "nothing was centred", cka_of(no_centre), "raw")
cka_mistake("cka_biased", "nothing was centred", cka_of(no_centre), "raw")
cka_mistake("cka_biased", "only one side", cka_of(once), "one_side")
cka_mistake("cka", "root in the denominator", lambda X, Y: song(X @ X.T, Y @ Y.T) / (song(X @ X.T, X @ X.T) * song(Y @ Y.T, Y @ Y.T)), "no_root")
cka_mistake("cka_biased", "denominator is missing", lambda X, Y: course_hsic(X @ X.T, Y @ Y.T), "no_ratio")
cka_mistake("cka", "different estimators", lambda X, Y: song(X @ X.T, Y @ Y.T) / (course_hsic(X @ X.T, X @ X.T) * course_hsic(Y @ Y.T, Y @ Y.T)) ** 0.5, "mixed")
cka_mistake("cka", "set to 0", lambda X, Y: from_song(X, Y).clamp(0, 1), "clamp")
cka_mistake("cka", "standardised", lambda X, Y: from_song((X - X.mean(0)) / X.std(0, correction=0), (Y - Y.mean(0)) / Y.std(0, correction=0)), "standard")
cka_mistake("cka_biased", "X was centred", lambda X, Y: cka_of(no_centre)(X - X.mean(0), Y), "x_only")
cka_mistake("cka_biased", "small number", lambda X, Y: course_hsic(X @ X.T, Y @ Y.T) / ((course_hsic(X @ X.T, X @ X.T) * course_hsic(Y @ Y.T, Y @ Y.T)) ** 0.5 + 1e-6), "epsilon")
cka_mistake("cka", "was squared", lambda X, Y: from_song(X, Y) ** 2, "squared")
cka_mistake("cka_biased", "root was taken of the whole", lambda X, Y: kornblith(X, Y) ** 0.5, "rooted")
cka_mistake("cka_biased", "with itself", lambda X, Y: kornblith(X, X), "typo")
cka_mistake("cka", "1 − CKA", lambda X, Y: 1 - from_song(X, Y), "distance")
cka_mistake("cka_biased", "not centred", lambda X, Y: kornblith(X, Y) * (1 + 0.1 * X.mean().abs()), "something_unforeseen")


@right("minibatch_cka")
def sums(batches_x, batches_y):
    xy = xx = yy = 0
    for X, Y in zip(batches_x, batches_y, strict=True):
        K, L = X @ X.T, Y @ Y.T
        xy, xx, yy = xy + song(K, L), xx + song(K, K), yy + song(L, L)
    return xy / (xx * yy) ** 0.5


@right("minibatch_cka")
def means_numpy(batches_x, batches_y):
    Ks, Ls = [by_einsum(X) for X in batches_x], [by_einsum(Y) for Y in batches_y]
    xy, xx, yy = (np.mean([szekely_numpy(*pair) for pair in zip(A, B, strict=True)]) for A, B in ((Ks, Ls), (Ks, Ks), (Ls, Ls)))
    return xy / np.sqrt(xx) / np.sqrt(yy)


@wrong("minibatch_cka", "ratio comes last")
def mean_of_ratios(batches_x, batches_y):
    return torch.stack([from_song(X, Y) for X, Y in zip(batches_x, batches_y, strict=True)]).mean()


@wrong("minibatch_cka", "last batch")
def overwritten(batches_x, batches_y):
    for X, Y in zip(batches_x, batches_y, strict=True):
        value = from_song(X, Y)
    return value


@wrong("minibatch_cka", "first batch")
def early_return(batches_x, batches_y):
    for X, Y in zip(batches_x, batches_y, strict=True):
        return from_song(X, Y)


@wrong("minibatch_cka", "joined into one")
def concatenated(batches_x, batches_y):
    return from_song(torch.cat(batches_x), torch.cat(batches_y))


@wrong("minibatch_cka", "biased estimator was averaged")
def biased_batches(batches_x, batches_y):
    xy = xx = yy = 0
    for X, Y in zip(batches_x, batches_y, strict=True):
        K, L = X @ X.T, Y @ Y.T
        xy, xx, yy = xy + course_hsic(K, L), xx + course_hsic(K, K), yy + course_hsic(L, L)
    return xy / (xx * yy) ** 0.5


@wrong("minibatch_cka", "root in the denominator")
def no_root_at_the_end(batches_x, batches_y):
    pairs = list(zip(batches_x, batches_y, strict=True))
    xy, xx, yy = (np.mean([float(song(A @ A.T, B @ B.T)) for A, B in ab]) for ab in (
        pairs, [(X, X) for X, _ in pairs], [(Y, Y) for _, Y in pairs]))
    return xy / (xx * yy)


# Attention

@right("patch_distances")
def meshgrid_torch(grid, patch_size):
    y, x = torch.meshgrid(torch.arange(grid[0]), torch.arange(grid[1]), indexing="ij")
    yx = torch.stack([y.ravel(), x.ravel()], 1).float() * patch_size
    return torch.cdist(yx, yx)


@right("patch_distances")
def divmod_loops(grid, patch_size):
    count = grid[0] * grid[1]
    D = np.zeros((count, count))
    for a in range(count):
        for b in range(count):
            (ya, xa), (yb, xb) = divmod(a, grid[1]), divmod(b, grid[1])
            D[a, b] = patch_size * ((ya - yb) ** 2 + (xa - xb) ** 2) ** 0.5
    return D


def coordinates(grid, patch_size=1):
    return np.array([(y, x) for y in range(grid[0]) for x in range(grid[1])], float) * patch_size


def distance_mistake(fragment, function, label):
    function.__name__ = label
    wrong("patch_distances", fragment)(function)


distance_mistake("not in pixels", lambda g, p: meshgrid_torch(g, 1), "in_patches")
distance_mistake("squared: a root", lambda g, p: meshgrid_torch(g, p) ** 2, "squared")
distance_mistake("straight line is shorter", lambda g, p: np.abs(coordinates(g, p)[:, None] - coordinates(g, p)).sum(-1), "manhattan")
distance_mistake("larger of the two", lambda g, p: np.abs(coordinates(g, p)[:, None] - coordinates(g, p)).max(-1), "chebyshev")
distance_mistake("exchanged", lambda g, p: meshgrid_torch(g[::-1], p), "columns_first")
distance_mistake("square", lambda g, p: meshgrid_torch((int((g[0] * g[1]) ** 0.5),) * 2, p), "root_of_tokens")
distance_mistake("one line", lambda g, p: p * abs(torch.arange(g[0] * g[1])[:, None] - torch.arange(g[0] * g[1])), "token_numbers")
distance_mistake("row and a column too many", lambda g, p: torch.nn.functional.pad(meshgrid_torch(g, p), (1, 0, 1, 0)), "with_cls")
distance_mistake("only rows count, or only columns", lambda g, p: np.abs(coordinates(g, p)[:, None, 1] - coordinates(g, p)[:, 1]), "x_only")


def patches_only(maps):
    A = maps[:, :, 1:, 1:]
    return A / A.sum(-1, keepdim=True)


@right("mean_distance")
def einsum_heads(maps, distances):
    A = patches_only(maps)
    return torch.einsum("nhqk,qk->h", A, distances) / (A.shape[0] * A.shape[2])


@right("mean_distance")
def numpy_ratio(maps, distances):
    A = np.asarray(maps)[..., 1:, 1:]
    return ((A * np.asarray(distances)).sum(-1) / A.sum(-1)).mean(axis=(0, 2))


@right("mean_distance")
def head_by_head(maps, distances):
    return [torch.stack([(row * d).sum() / row.sum() for image in maps[:, h, 1:, 1:] for row, d in zip(image, distances, strict=True)]).mean()
            for h in range(maps.shape[1])]


def attention_mistake(fragment, function, label):
    function.__name__ = label
    wrong("mean_distance", fragment)(function)


attention_mistake("CLS was left in", lambda A, D: (A * torch.nn.functional.pad(D, (1, 0, 1, 0))).sum(-1).mean((0, 2)), "cls_in")
attention_mistake("no longer sums to 1", lambda A, D: (A[..., 1:, 1:] * D).sum(-1).mean((0, 2)), "not_renormalised")
attention_mistake("heads were averaged before", lambda A, D: (patches_only(A).mean(1) * D).sum(-1).mean(), "heads_first")
attention_mistake("weighted sum", lambda A, D: (patches_only(A) * D).mean((0, 2, 3)), "mean_over_keys")
attention_mistake("summed over queries", lambda A, D: (patches_only(A) * D).sum((2, 3)).mean(0), "sum_over_queries")
attention_mistake("most attended", lambda A, D: torch.stack([D[range(len(D)), A[i, :, 1:, 1:].argmax(-1)] for i in range(len(A))]).mean((0, 2)), "argmax")
attention_mistake("images were not averaged", lambda A, D: (patches_only(A) * D).sum(-1).mean(-1), "each_image")
attention_mistake("as a whole", lambda A, D: (A[..., 1:, 1:] * D).sum((0, 2, 3)) / A[..., 1:, 1:].sum((0, 2, 3)), "scaled_as_a_whole")
attention_mistake("weights play no part", lambda A, D: D.mean().repeat(A.shape[1]), "unweighted")
attention_mistake("CLS", lambda A, D: (A[..., :-1, :-1] * D).sum(-1).mean((0, 2)), "last_dropped")


# Receptive fields

@right("radius")
def sorted_numpy(field):
    field = np.asarray(field, float)
    y, x = np.mgrid[: field.shape[0], : field.shape[1]]
    d = np.round(np.sqrt((y - (field.shape[0] - 1) / 2) ** 2 + (x - (field.shape[1] - 1) / 2) ** 2), 9)
    return next(r for r in np.unique(d) if field[d <= r].sum() >= field.sum() / 2 * (1 - 1e-9))


@right("radius")
def cumulative_torch(field):
    h, w = field.shape
    d = torch.hypot(torch.arange(h)[:, None] - (h - 1) / 2, torch.arange(w)[None] - (w - 1) / 2).ravel()
    order = d.argsort()
    share = field.ravel()[order].double().cumsum(0) / field.double().sum()
    return d[order][(share >= 0.5 - 1e-9).nonzero()[0]]


def rings(field, goal, cy, cx):
    y, x = np.mgrid[: field.shape[0], : field.shape[1]]
    d = np.hypot(y - cy, x - cx)
    order = np.argsort(d.ravel(), kind="stable")
    total = np.cumsum(np.asarray(field, float).ravel()[order])
    return d.ravel()[order][np.searchsorted(total, goal * (1 - 1e-9))]


def field_mistake(fragment, function, label):
    function.__name__ = label
    wrong("radius", fragment)(function)


def half(field):
    return np.asarray(field, float).sum() / 2


def middle(field):
    return (field.shape[0] - 1) / 2, (field.shape[1] - 1) / 2


field_mistake("diameter", lambda f: 2 * rings(f, half(f), *middle(f)), "diameter")
field_mistake("half a pixel off", lambda f: rings(f, half(f), f.shape[0] // 2, f.shape[1] // 2), "floor_division")
field_mistake("half a pixel off", lambda f: rings(f, half(f), f.shape[0] / 2, f.shape[1] / 2), "half_size")
field_mistake("brought to sum 1", lambda f: rings(f, 0.5, *middle(f)), "not_normalised")
field_mistake("from the peak", lambda f: rings(f, half(f), *np.unravel_index(int(np.asarray(f).argmax()), f.shape)), "from_peak")
field_mistake("mean distance", lambda f: float((f * torch.hypot(torch.arange(f.shape[0])[:, None] - middle(f)[0], torch.arange(f.shape[1]) - middle(f)[1])).sum() / f.sum()), "mean")
field_mistake("half of the pixels", lambda f: rings(np.ones(f.shape), f.numel() / 2, *middle(f)), "half_the_pixels")
field_mistake("root is missing", lambda f: rings(f, half(f), *middle(f)) ** 2, "no_root")


# Skips

@right("norm_ratios")
def torch_norm(z, f):
    return (z.norm(dim=-1) / f.norm(dim=-1)).mean(0)


@right("norm_ratios")
def numpy_norm(z, f):
    return np.mean(np.linalg.norm(z, axis=2) / np.linalg.norm(f, axis=2), axis=0)


@right("norm_ratios")
def einsum_norm(z, f):
    return torch.sqrt(torch.einsum("ntd,ntd->nt", z, z) / torch.einsum("ntd,ntd->nt", f, f)).mean(dim=0)


def ratio_mistake(fragment, function, label):
    function.__name__ = label
    wrong("norm_ratios", fragment)(function)


ratio_mistake("upside down", lambda z, f: torch_norm(f, z), "inverted")
ratio_mistake("ratio of two means", lambda z, f: z.norm(dim=-1).mean(0) / f.norm(dim=-1).mean(0), "ratio_of_means")
ratio_mistake("over tokens", lambda z, f: (z.norm(dim=-1) / f.norm(dim=-1)).mean(1), "tokens_averaged")
ratio_mistake("tokens were averaged too", lambda z, f: (z.norm(dim=-1) / f.norm(dim=-1)).mean(), "one_number")
ratio_mistake("output z + f(z)", lambda z, f: torch_norm(z, z + f), "block_output")
ratio_mistake("vectors cancel", lambda z, f: z.mean(0).norm(dim=-1) / f.mean(0).norm(dim=-1), "mean_vector")
ratio_mistake("squared", lambda z, f: (z.square().sum(-1) / f.square().sum(-1)).mean(0), "no_root")
ratio_mistake("absolute values", lambda z, f: (z.abs().sum(-1) / f.abs().sum(-1)).mean(0), "l1")
ratio_mistake("share of both", lambda z, f: (z.norm(dim=-1) / (z.norm(dim=-1) + f.norm(dim=-1))).mean(0), "share")
ratio_mistake("another mean", lambda z, f: (z.norm(dim=-1) / f.norm(dim=-1)).log().mean(0).exp(), "geometric")
ratio_mistake("images were not averaged", lambda z, f: z.norm(dim=-1) / f.norm(dim=-1), "all_images")


# Localisation

@right("sharpness")
def by_loop(maps):
    out = []
    for i, one in enumerate(maps):
        flat = one.flatten()
        out.append(flat[i] - (flat.sum() - flat[i]) / (len(flat) - 1))
    return torch.stack(out)


@right("sharpness")
def by_mask(maps):
    flat = np.asarray(maps).reshape(len(maps), -1)
    eye = np.eye(len(flat), dtype=bool)
    return flat[eye] - np.where(eye, 0, flat).sum(1) / (len(flat) - 1)


def sharp_mistake(fragment, function, label):
    function.__name__ = label
    wrong("sharpness", fragment)(function)


sharp_mistake("left in the mean", lambda m: m.flatten(1).diagonal() - m.mean((1, 2)), "own_included")
sharp_mistake("largest value, wherever", lambda m: m.amax((1, 2)) - (m.sum((1, 2)) - m.amax((1, 2))) / (m[0].numel() - 1), "peak")
sharp_mistake("best of the other", lambda m: m.flatten(1).diagonal() - m.flatten(1).masked_fill(torch.eye(len(m)).bool(), -9).amax(1), "next_best")
sharp_mistake("column by column", lambda m: by_mask(np.asarray(m).reshape(len(m), *m.shape[1:]).transpose(0, 2, 1)), "column_major")
sharp_mistake("ratio", lambda m: m.flatten(1).diagonal() / ((m.sum((1, 2)) - m.flatten(1).diagonal()) / (m[0].numel() - 1)), "ratio")
sharp_mistake("not taken off", lambda m: m.flatten(1).diagonal(), "own_only")
sharp_mistake("smallest of the other", lambda m: m.flatten(1).diagonal() - m.flatten(1).masked_fill(torch.eye(len(m)).bool(), 9).amin(1), "worst")
sharp_mistake("lost their sign", lambda m: by_loop(m).abs(), "absolute")
sharp_mistake("sign", lambda m: -by_loop(m), "minus")


# Probes

@right("ridge")
def torch_solve(X, y, Z, classes, l2):
    mean, std = X.mean(0), X.std(0, correction=0)
    A, B = (X - mean) / std, (Z - mean) / std
    T = torch.nn.functional.one_hot(y, classes).to(X) * 2 - 1
    W = torch.linalg.solve(A.T @ A + l2 * torch.eye(A.shape[1]), A.T @ (T - T.mean(0)))
    return B @ W + T.mean(0)


@right("ridge")
def sklearn_ridge(X, y, Z, classes, l2):
    from sklearn.linear_model import Ridge
    from sklearn.preprocessing import StandardScaler
    X, y, Z = (np.asarray(a) for a in (X, y, Z))
    scaler = StandardScaler().fit(X)
    model = Ridge(alpha=l2).fit(scaler.transform(X), np.where(np.eye(classes)[y] > 0, 1.0, -1.0))
    return model.predict(scaler.transform(Z)).reshape(len(Z), classes)


def probe(X, y, Z, classes, l2, low=-1.0, train=None, bias=1.0, correction=0):
    X, Z = X.double(), Z.double()
    A = (X - X.mean(0)) / X.std(0, correction=correction)
    S = X if train is None else Z
    B = (Z - S.mean(0)) / S.std(0, correction=correction)
    T = torch.where(torch.nn.functional.one_hot(y, classes) > 0, 1.0, low).double()
    W = torch.linalg.solve(A.T @ A + l2 * torch.eye(A.shape[1]).double(), A.T @ (T - bias * T.mean(0)))
    return B @ W + bias * T.mean(0)


def probe_mistake(fragment, function, label):
    function.__name__ = label
    wrong("ridge", fragment)(function)


probe_mistake("0 and 1", lambda *a: probe(*a, low=0.0), "zero_one")
probe_mistake("their own statistics", lambda *a: probe(*a, train=False, correction=0), "test_statistics")
probe_mistake("no bias", lambda *a: probe(*a, bias=0.0), "no_bias")
probe_mistake("divides by n − 1", lambda *a: probe(*a, correction=1), "torch_default")
probe_mistake("penalty is missing", lambda X, y, Z, c, l2: probe(X, y, Z, c, 1e-9), "no_penalty")
probe_mistake("l2 plays no part", lambda X, y, Z, c, l2: probe(X, y, Z, c, 1.0), "l2_ignored")
probe_mistake("its root taken", lambda X, y, Z, c, l2: probe(X, y, Z, c, l2**0.5), "root_of_l2")
probe_mistake("labels; scores", lambda *a: probe(*a).argmax(1), "labels")
probe_mistake("multiplied by the number", lambda X, y, Z, c, l2: probe(X, y, Z, c, l2 * len(X)), "l2_times_n")
probe_mistake("training images; those of Z", lambda X, y, Z, c, l2: probe(X, y, X, c, l2), "scores_of_x")
