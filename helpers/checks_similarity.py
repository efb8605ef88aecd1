"""Checkers of the exercises on centring, HSIC and CKA: n images, p and q features.

The unbiased HSIC₁ is Song et al. 2012, in their own three terms; the biased one Gretton et al. 2005.
"""

from __future__ import annotations

import numpy as np

from .checking import Check, normal

# Centring


def _centre(n):
    return np.array([[float(i == j) - 1 / n for j in range(n)] for i in range(n)])


centring = Check(
    "centring(n)",
    _centre,
    lambda rng: [(f"n = {n}", (n,)) for n in (4, 1, 2, 7, int(rng.integers(8, 20)))],
    {
        "your matrix takes away the sum over the images, not their mean": lambda n: np.eye(n) - 1,
        "the matrix of ones lacks its factor, or has another: what does a row of yours sum to?": lambda n: (
            np.eye(n) - 1 / (n - 1)
        ),
        "this matrix averages; subtract the average from what was there": lambda n: np.ones((n, n)) / n,
        "the sign is wrong: the mean is taken off, not put on": lambda n: np.eye(n) + 1 / n,
        "only the diagonal was changed: the mean of an image's row needs all the others": lambda n: (
            np.eye(n) * (1 - 1 / n)
        ),
        "this is the identity: it leaves the mean where it is": lambda n: np.eye(n),
    },
)


def _gram(X):
    X = X - X.mean(0)
    return np.array([[sum(x * y) for y in X] for x in X])


def _features(rng):
    n, p = (int(k) for k in rng.integers(5, 12, 2))
    yield f"{n} images and {p} features", (normal(rng, n, p, mean=1),)
    yield "one feature", (normal(rng, 5, 1, mean=1),)
    yield "more features than images", (normal(rng, 3, 11),)
    yield "as many features as images", (normal(rng, 6, 6, mean=2),)
    yield "a large mean", (normal(rng, 7, 4, mean=20),)


def raw(X):
    return X @ X.T


centred_gram = Check(
    "centred_gram(X)",
    _gram,
    _features,
    {
        "the features were not centred": raw,
        "you centred over the features of each image; the mean over images was to go": lambda X: raw(
            X - X.mean(1, keepdims=True)
        ),
        "you took away one mean of everything, not one for each feature": lambda X: raw(X - X.mean()),
        "you compared features with features: the result must compare images with images": lambda X: (
            (X - X.mean(0)).T @ (X - X.mean(0))
        ),
        "you centred one side only: rows or columns of the Gram matrix, not both": (
            lambda X: raw(X) - raw(X).mean(0),
            lambda X: raw(X) - raw(X).mean(1, keepdims=True),
        ),
        "row and column means are off, and with them the overall mean twice": lambda X: (
            raw(X) - raw(X).mean(0) - raw(X).mean(1, keepdims=True)
        ),
        "you standardised the features: their spread must stay": (
            lambda X: raw((X - X.mean(0)) / X.std(0)),
            lambda X: raw((X - X.mean(0)) / X.std(0, ddof=1)),
        ),
        "you scaled each image to length 1: that is cosine similarity": lambda X: raw(
            (X - X.mean(0)) / np.linalg.norm(X - X.mean(0), axis=1, keepdims=True)
        ),
        "you divided by the number of features or images; a Gram matrix is a plain product": lambda X: (
            _gram(X) / len(X)
        ),
    },
    {"adding a constant to a feature changes your result: it was not centred": lambda X: (X + 3,)},
)


# HSIC, from two Gram matrices


def _two_grams(rng):
    def draw(n, p, q, mean):
        X, Y = normal(rng, n, p, mean=mean), normal(rng, n, q, mean=mean)
        Y[:, 0] += X[:, 0]
        return np.float32(raw(X)).astype(float), np.float32(raw(Y)).astype(float)

    def grams(n, p, q, mean=1.0):  # of several the one with the HSIC furthest from 0: rounding counts less
        return max((draw(n, p, q, mean) for _ in range(9)), key=lambda pair: abs(_hsic1(*pair)))

    n = int(rng.integers(6, 12))
    yield f"{n} images", grams(n, 3, 5)
    yield "4 images, the fewest", grams(4, 3, 2)
    yield "the same Gram matrix twice", (grams(7, 4, 4)[0],) * 2
    yield "features of mean 0", grams(9, 6, 2, mean=0)
    yield "features that have nothing in common", _disjoint()
    yield "an odd number of images", grams(2 * n + 1, 2, 3)


def _disjoint():
    """Two Gram matrices of different columns of a Hadamard matrix, 8 images: their HSIC₁ is negative."""
    two = np.array([[1, 1], [1, -1]])
    H = np.kron(np.kron(two, two), two).astype(float)
    return raw(H[:, 1:4] + 1), raw(H[:, 4:8] + 1)


def _hsic(K, L):
    n = len(K)
    return np.trace(K @ _centre(n) @ L @ _centre(n)) / (n - 1) ** 2


def _shift(K, L):
    u = np.cos(np.arange(len(K))) + 2
    return K + u[:, None] + u, L


def _shuffle(K, L):
    return K[::-1, ::-1].copy(), L[::-1, ::-1].copy()


def _half(K):
    return _centre(len(K)) @ K


def _whole(K):
    return _half(K) @ _centre(len(K))


_RULES = {
    "adding the same number to every entry of K changes your result: K is not centred": lambda K, L: (
        K + 2,
        L,
    ),
    "adding the same number to every entry of L changes your result: L is not centred": lambda K, L: (
        K,
        L + 2,
    ),
    "moving all features by one vector changes your result: centre rows and columns": _shift,
    "your result depends on the order of the images": _shuffle,
    "exchanging K and L changes your result: the two must be treated alike": lambda K, L: (L, K),
}

hsic = Check(
    "hsic(K, L)",
    _hsic,
    _two_grams,
    {
        "neither matrix was centred": lambda K, L: (K * L).sum() / (len(K) - 1) ** 2,
        "you centred only one side: rows or columns, not both": lambda K, L: (
            (_half(K) * _half(L)).sum() / (len(K) - 1) ** 2
        ),
        "the centring matrix takes away sums, not means: its matrix of ones lacks a factor": lambda K, L: (
            np.trace(K @ (np.eye(len(K)) - 1) @ L @ (np.eye(len(K)) - 1)) / (len(K) - 1) ** 2
        ),
        "you divided by n²: that is not the divisor of this estimator": lambda K, L: (
            _whole(K) * _whole(L)
        ).mean(),
        "you divided by the number of images, less one, only once": lambda K, L: _hsic(K, L) * (len(K) - 1),
        "you did not divide by anything: the sum grows with the number of images": lambda K, L: (
            _whole(K) * _whole(L)
        ).sum(),
        "you divided by n(n − 1), or by n: that is not the divisor of this estimator": (
            lambda K, L: _hsic(K, L) * (len(K) - 1) / len(K),
            lambda K, L: _hsic(K, L) * (len(K) - 1) ** 2 / len(K),
        ),
        "you divided by n(n − 3), the divisor of the unbiased estimator": lambda K, L: (
            (_whole(K) * _whole(L)).sum() / len(K) / (len(K) - 3)
        ),
        "this is the unbiased estimator; the biased one was asked for": lambda K, L: _hsic1(K, L),
        "a root was taken": lambda K, L: np.sqrt(_hsic(K, L)),
        "you summed all entries of a matrix product; what is needed is its trace": lambda K, L: (
            (_whole(K) @ _whole(L)).sum() / (len(K) - 1) ** 2
        ),
        "you took the trace of an entry-by-entry product, K * L": lambda K, L: (
            np.trace(_whole(K) * _whole(L)) / (len(K) - 1) ** 2
        ),
        "this is already a ratio, CKA: HSIC itself is not normalised": lambda K, L: (
            _hsic(K, L) / np.sqrt(_hsic(K, K) * _hsic(L, L))
        ),
        "K was used twice; L plays no part": lambda K, L: _hsic(K, K),
    },
    _RULES,
    "both sides are centred and treated alike, so look at factors and divisors",
)


def _bare(K):
    return K - np.diag(np.diag(K))


def _three_terms(K, L, second=1.0, third=2.0, clean=(True, True)):
    """Song et al. 2012 in their own three terms, each with a factor that a slip can change."""
    n = len(K)
    K, L = (_bare(G) if bare else G for G, bare in zip((K, L), clean, strict=True))
    a, b, c = np.trace(K @ L), K.sum() * L.sum() / ((n - 1) * (n - 2)), (K @ L).sum() / (n - 2)
    return (a + second * b - third * c) / (n * (n - 3))


def _hsic1(K, L):
    return _three_terms(K, L)


def _times(K):
    return len(K) * (len(K) - 3)


hsic1 = Check(
    "hsic1(K, L)",
    _hsic1,
    _two_grams,
    {
        "this is the biased estimator": _hsic,
        "the diagonal was not removed": lambda K, L: _three_terms(K, L, clean=(False, False)),
        "the diagonal was removed from K only": lambda K, L: _three_terms(K, L, clean=(True, False)),
        "the diagonal was removed from L only": lambda K, L: _three_terms(K, L, clean=(False, True)),
        "a row was subtracted, not the diagonal: diag(K) as a vector is taken off every row": lambda K, L: (
            _slipped(K - np.diag(K), L - np.diag(L))
        ),
        "the diagonal was removed, and the centring afterwards filled it again": lambda K, L: (
            (_whole(_bare(K)) * _whole(_bare(L))).sum() / _times(K)
        ),
        "the diagonal was removed after the centring: the means must leave it out as well": lambda K, L: (
            (_bare(_whole(K)) * _bare(_whole(L))).sum() / _times(K)
        ),
        "only the biased estimator's divisor was changed": lambda K, L: (
            (_whole(K) * _whole(L)).sum() / _times(K)
        ),
        "you divided by n²: that is not the divisor of this estimator": lambda K, L: (
            _hsic1(K, L) * _times(K) / len(K) ** 2
        ),
        "you divided by (n − 1)², the divisor of the biased estimator": lambda K, L: (
            _hsic1(K, L) * _times(K) / (len(K) - 1) ** 2
        ),
        "you divided by the number of pairs, n(n − 1)": lambda K, L: (
            _hsic1(K, L) * (len(K) - 3) / (len(K) - 1)
        ),
        "you did not divide by anything": lambda K, L: _hsic1(K, L) * _times(K),
        "the term with the two total sums is missing": lambda K, L: _three_terms(K, L, second=0),
        "the term with the sum of the matrix product is missing": lambda K, L: _three_terms(K, L, third=0),
        "the last term has the wrong sign": lambda K, L: _three_terms(K, L, third=-2),
        "the last term lacks a factor": lambda K, L: _three_terms(K, L, third=1),
        "the two terms that correct for the means are both missing": lambda K, L: _three_terms(K, L, 0, 0),
        "the divisor of the term with the total sums is another": (
            lambda K, L: _three_terms(K, L, second=(len(K) - 2) / (len(K) - 1)),
            lambda K, L: _three_terms(K, L, second=(len(K) - 1) / (len(K) - 2)),
            lambda K, L: _three_terms(K, L, second=(len(K) - 2) / len(K)),
        ),
        "the term with the total sums is not divided by anything of its own": lambda K, L: (
            _three_terms(K, L, second=(len(K) - 1) * (len(K) - 2))
        ),
        "the term with the total sums has the wrong sign": lambda K, L: _three_terms(K, L, second=-1),
        "the divisor of the last term is another, or missing": (
            lambda K, L: _three_terms(K, L, third=2 * (len(K) - 2)),
            lambda K, L: _three_terms(K, L, third=2 * (len(K) - 2) / (len(K) - 1)),
            lambda K, L: _three_terms(K, L, third=2 * (len(K) - 2) / len(K)),
        ),
        "the last term needs the matrix product K @ L, not the entry-by-entry one": lambda K, L: (
            _three_terms(K, L, third=0)
            - 2 * (_bare(K) * _bare(L)).sum() / (len(K) - 2) / _times(K)
        ),
        "this is already a ratio, CKA: HSIC itself is not normalised": lambda K, L: (
            _hsic1(K, L) / np.sqrt(_hsic1(K, K) * _hsic1(L, L))
        ),
        "K was used twice; L plays no part": lambda K, L: _hsic1(K, K),
        "negative values were set to 0, or their sign dropped: keep them": (
            lambda K, L: max(_hsic1(K, L), 0),
            lambda K, L: abs(_hsic1(K, L)),
        ),
        "you took the trace of an entry-by-entry product, K * L: without diagonals that is 0": lambda K, L: (
            _three_terms(K, L) - np.trace(_bare(K) @ _bare(L)) / _times(K)
        ),
    },
    {
        "the diagonals still count: similarity of an image with itself must play no part": lambda K, L: (
            K + np.diag(np.arange(5, 5 + len(K))),
            L + np.diag(np.arange(9, 9 + len(K))),
        ),
        **{hint.replace("is not centred", "counts with its mean"): rule for hint, rule in _RULES.items()},
    },
    "diagonals and means are gone, so look at factors and divisors",
)


def _slipped(K, L):
    return _three_terms(K, L, clean=(False, False))


# CKA, from features


def _two_features(rng):
    def pair(n, p, q, mean=1.0, shared=1.0):
        X, Y = normal(rng, n, p, mean=mean), normal(rng, n, q, mean=mean)
        k = min(p, q)
        Y[:, :k] += shared * X[:, :k]
        return X, Y

    n = int(rng.integers(8, 14))
    yield f"{n} images", pair(n, 3, 5)
    yield "as many features in Y as in X", pair(n, 4, 4)
    yield "one feature", pair(n + 1, 1, 2)
    yield "more features than images", pair(5, 12, 9)
    yield "features of very different size", (pair(n, 3, 5)[0] * [1, 0.125, 4], pair(n, 3, 5)[1])
    X, Y = pair(n, 4, 3)
    yield "features that are all very small", (X * 2.0**-16, Y)
    yield (
        "features that have nothing in common",
        tuple(
            np.kron(np.kron(a, b), c) + 1.0
            for a, b, c in [
                ([[1], [1]], [[1, 1], [1, -1]], [[1], [-1]]),
                ([[1], [-1]], [[1, 1], [1, -1]], [[1], [1]]),
            ]
        ),
    )
    X = normal(rng, n, 4, mean=2)
    yield "Y the same as X", (X, X.copy())


def _ratio(measure, gram=raw):
    def value(X, Y):
        K, L = gram(X), gram(Y)
        return measure(K, L) / np.sqrt(measure(K, K) * measure(L, L))

    return value


def _uncentred(K, L):
    return (K * L).sum()


def _between_features(X, Y):
    if X.shape[1] != Y.shape[1]:
        raise ValueError
    return _ratio(_hsic1)(X.T, Y.T)


def _rotate(X, Y):
    return X @ np.linalg.qr(np.random.default_rng(0).normal(size=(X.shape[1],) * 2))[0], Y


def _shuffle_images(X, Y):
    return X[::-1].copy(), Y[::-1].copy()


def _cka_check(call, own, other, name_of_other, **more):
    right = _ratio(own)
    return Check(
        call,
        right,
        _two_features,
        {
            f"this is CKA with the {name_of_other} estimator": _ratio(other),
            "nothing was centred, so the mean of the features counts as similarity": _ratio(_uncentred),
            "only one side was centred: rows or columns, not both": _ratio(
                lambda K, L: (_half(K) * _half(L)).sum()
            ),
            "only X was centred": lambda X, Y: _ratio(_uncentred)(X - X.mean(0), Y),
            "the root in the denominator is missing": lambda X, Y: (
                own(raw(X), raw(Y)) / (own(raw(X), raw(X)) * own(raw(Y), raw(Y)))
            ),
            "the denominator is missing: this is HSIC": lambda X, Y: own(raw(X), raw(Y)),
            "numerator and denominator use different estimators": lambda X, Y: (
                own(raw(X), raw(Y)) / np.sqrt(other(raw(X), raw(X)) * other(raw(Y), raw(Y)))
            ),
            "numerator and denominator use different estimators, the numerator the wrong one": lambda X, Y: (
                other(raw(X), raw(Y)) / np.sqrt(own(raw(X), raw(X)) * own(raw(Y), raw(Y)))
            ),
            "the denominator holds one of the two features only": lambda X, Y: (
                own(raw(X), raw(Y)) / own(raw(X), raw(X))
            ),
            "features were compared with features, where images should be with images": _between_features,
            "you correlated the entries of the two Gram matrices, diagonal included": lambda X, Y: (
                np.corrcoef(raw(X).ravel(), raw(Y).ravel())[0, 1]
            ),
            "you scaled each image to length 1 first": lambda X, Y: right(
                X / np.linalg.norm(X, axis=1, keepdims=True), Y / np.linalg.norm(Y, axis=1, keepdims=True)
            ),
            "you standardised each feature first: CKA lets large features count more": lambda X, Y: right(
                (X - X.mean(0)) / X.std(0), (Y - Y.mean(0)) / Y.std(0)
            ),
            "the result was squared": lambda X, Y: right(X, Y) ** 2,
            "a root was taken of the whole ratio": lambda X, Y: np.sqrt(right(X, Y)),
            "X was compared with itself; Y plays no part": lambda X, Y: 1.0,
            "this is the distance 1 − CKA": lambda X, Y: 1 - right(X, Y),
            "a small number was added to the denominator: it outweighs small features": tuple(
                lambda X, Y, small=small: (
                    own(raw(X), raw(Y)) / (np.sqrt(own(raw(X), raw(X)) * own(raw(Y), raw(Y))) + small)
                )
                for small in (1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3)
            ),
            **more,
        },
        {
            "X plus a constant gives another result: features are not centred": lambda X, Y: (
                X + 3 * X.std(),
                Y,
            ),
            "Y plus a constant gives another result: features are not centred": lambda X, Y: (
                X,
                Y - 3 * Y.std(),
            ),
            "a multiple of X gives another result: numerator and denominator must balance": lambda X, Y: (
                X * 0.25,
                Y,
            ),
            "a multiple of Y gives another result: numerator and denominator must balance": lambda X, Y: (
                X,
                Y * 4,
            ),
            "rotated features give another result: something is done feature by feature": _rotate,
            "your result depends on the order of the images": _shuffle_images,
            "exchanging X and Y changes your result: the two must be treated alike": lambda X, Y: (Y, X),
        },
    )


cka = _cka_check(
    "cka(X, Y)",
    _hsic1,
    _hsic,
    "biased",
    **{
        "negative values were set to 0, or their sign dropped: keep them": (
            lambda X, Y: max(_ratio(_hsic1)(X, Y), 0),
            lambda X, Y: abs(_ratio(_hsic1)(X, Y)),
        )
    },
)
cka_biased = _cka_check("cka_biased(X, Y)", _hsic, _hsic1, "unbiased")


def _means(measure, Xs, Ys):
    return [
        np.mean([measure(raw(A), raw(B)) for A, B in zip(As, Bs, strict=True)])
        for As, Bs in ((Xs, Ys), (Xs, Xs), (Ys, Ys))
    ]


def _minibatch(measure):
    def value(Xs, Ys):
        xy, xx, yy = _means(measure, Xs, Ys)
        return xy / np.sqrt(xx * yy)

    return value


def _batches(rng):
    def lists(count, n, p, q):
        Xs, Ys = [normal(rng, n, p, mean=1) for _ in range(count)], [normal(rng, n, q) for _ in range(count)]
        sizes = rng.uniform(0.5, 2, count)
        Ys = [Y + 0.7 * X[:, :1] for X, Y in zip(Xs, Ys, strict=True)]
        return [np.float32(X * s).astype(float) for X, s in zip(Xs, sizes, strict=True)], [
            np.float32(Y / s).astype(float) for Y, s in zip(Ys, sizes, strict=True)
        ]

    yield "3 batches of 6 images", lists(3, 6, 4, 3)
    yield "one batch", lists(1, 9, 3, 5)
    yield "many batches of 4 images, the fewest", lists(int(rng.integers(9, 14)), 4, 5, 5)
    yield "more features than images", lists(4, 5, 11, 8)


minibatch_cka = Check(
    "minibatch_cka(batches_x, batches_y)",
    _minibatch(_hsic1),
    _batches,
    {
        "you averaged the CKA of the batches; the ratio comes last": lambda Xs, Ys: np.mean(
            [_ratio(_hsic1)(X, Y) for X, Y in zip(Xs, Ys, strict=True)]
        ),
        "the biased estimator was averaged: its bias stays, however many batches": _minibatch(_hsic),
        "the biased CKA of each batch was averaged: two things are to change": lambda Xs, Ys: np.mean(
            [_ratio(_hsic)(X, Y) for X, Y in zip(Xs, Ys, strict=True)]
        ),
        "all batches were joined, and the estimator is the biased one": lambda Xs, Ys: _ratio(_hsic)(
            np.concatenate(Xs), np.concatenate(Ys)
        ),
        "only the last batch counts: is something overwritten in the loop?": lambda Xs, Ys: _ratio(_hsic1)(
            Xs[-1], Ys[-1]
        ),
        "only the first batch counts: is the return inside the loop?": lambda Xs, Ys: _ratio(_hsic1)(
            Xs[0], Ys[0]
        ),
        "all batches were joined into one: another estimate, and no memory is saved": lambda Xs, Ys: _ratio(
            _hsic1
        )(np.concatenate(Xs), np.concatenate(Ys)),
        "the batches were averaged before they were compared": lambda Xs, Ys: _ratio(_hsic1)(
            np.mean(Xs, 0), np.mean(Ys, 0)
        ),
        "the root in the denominator is missing": lambda Xs, Ys: (
            _means(_hsic1, Xs, Ys)[0] / (_means(_hsic1, Xs, Ys)[1] * _means(_hsic1, Xs, Ys)[2])
        ),
        "the root was taken of each batch, then averaged: average first": lambda Xs, Ys: (
            _means(_hsic1, Xs, Ys)[0]
            / np.mean(
                [
                    np.sqrt(_hsic1(raw(X), raw(X)) * _hsic1(raw(Y), raw(Y)))
                    for X, Y in zip(Xs, Ys, strict=True)
                ]
            )
        ),
        "the numerator is summed over batches, the denominator averaged": lambda Xs, Ys: (
            _minibatch(_hsic1)(Xs, Ys) * len(Xs)
        ),
        "the denominator is missing: this is HSIC": lambda Xs, Ys: _means(_hsic1, Xs, Ys)[0],
        "numerator unbiased, denominator biased": lambda Xs, Ys: (
            _means(_hsic1, Xs, Ys)[0] / np.sqrt(_means(_hsic, Xs, Ys)[1] * _means(_hsic, Xs, Ys)[2])
        ),
    },
    {
        "your result depends on the order of the batches": lambda Xs, Ys: (Xs[::-1], Ys[::-1]),
        "adding a constant to the features changes your result": lambda Xs, Ys: ([X + 3 for X in Xs], Ys),
        "multiplying all features of X by a number changes your result": lambda Xs, Ys: (
            [X / 4 for X in Xs],
            Ys,
        ),
    },
)
