"""Checkers of the exercises on attention, receptive fields, skips, localisation and probes.

Shapes: n images, t tokens (CLS first), h heads, d width, gh x gw patches, c classes.
"""

from __future__ import annotations

import numpy as np

from .checking import Check, normal

# Attention


def _places(grid):
    return [(row, column) for row in range(grid[0]) for column in range(grid[1])]


def _distances(grid, patch, length=np.hypot):
    return np.array(
        [
            [float(length(abs(a - c) * patch, abs(b - d) * patch)) for c, d in _places(grid)]
            for a, b in _places(grid)
        ]
    )


def _square_only(grid, patch):
    side = int((grid[0] * grid[1]) ** 0.5)
    return _distances((side, side), patch)


patch_distances = Check(
    "patch_distances(grid, patch_size)",
    _distances,
    lambda rng: [
        ("a grid of 3 x 3", ((3, 3), 4)),
        ("a grid that is not square", ((2, 4), 16)),
        ("more rows than columns", ((int(rng.integers(4, 7)), 3), int(rng.integers(5, 20)))),
        ("one row", ((1, 5), 8)),
        ("a single patch", ((1, 1), 14)),
    ],
    {
        "the distances are counted in patches, not in pixels": lambda grid, patch: _distances(grid, 1),
        "the distances are squared: a root is missing": lambda grid, patch: _distances(grid, patch) ** 2,
        "squared in patches and then times the patch size": lambda grid, patch: (
            _distances(grid, 1) ** 2 * patch
        ),
        "you added the steps along rows and columns: a straight line is shorter": lambda grid, patch: (
            _distances(grid, patch, lambda y, x: y + x)
        ),
        "you took the larger of the two steps, not the straight line": lambda grid, patch: _distances(
            grid, patch, max
        ),
        "only rows count, or only columns": (
            lambda grid, patch: _distances(grid, patch, lambda y, x: y),
            lambda grid, patch: _distances(grid, patch, lambda y, x: x),
        ),
        "rows and columns are exchanged: the tokens run row by row": lambda grid, patch: _distances(
            grid[::-1], patch
        ),
        "the grid was taken to be square": _square_only,
        "this is the distance between token numbers, as if they lay on one line": lambda grid, patch: (
            patch * np.abs(np.subtract.outer(*[np.arange(grid[0] * grid[1])] * 2))
        ),
        "CLS has no place in the image: there is a row and a column too many": lambda grid, patch: np.pad(
            _distances(grid, patch), ((1, 0), (1, 0))
        ),
    },
)


def _mean_distance(maps, D, keep_cls=False):
    n, h, t, _ = maps.shape
    total = np.zeros(h)
    for image in range(n):
        for head in range(h):
            for query in range(1, t):
                weights = maps[image, head, query, 1:]
                mass = 1 if keep_cls else weights.sum()
                total[head] += sum(weights * D[query - 1]) / mass / n / (t - 1)
    return total


def _attention(rng):
    def maps(n, h, grid, patch):
        D = _distances(grid, patch)
        logits = rng.normal(size=(n, h, len(D) + 1, len(D) + 1)) * 2
        logits[..., 1:, 1:] -= np.linspace(0, 3, h)[:, None, None] * D / patch  # heads differ in reach
        weights = np.exp(logits)
        weights /= weights.sum(-1, keepdims=True)
        return np.float32(weights).astype(float), np.float32(D).astype(float)

    yield "2 images, 3 heads, a grid of 3 x 3", maps(2, 3, (3, 3), 4)
    yield "one image, one head", maps(1, 1, (2, 3), 8)
    yield "a grid that is not square", maps(3, 2, (2, 5), 16)
    yield "as many heads as images", maps(int(rng.integers(3, 5)), 4, (4, 3), 2)
    same, D = maps(2, 2, (2, 2), 4)
    identity = np.broadcast_to(np.eye(5), same.shape).copy()
    yield "every token attends to itself only", (identity, D)
    yield "uniform attention", (np.full(same.shape, 0.2), D)


def _weighted(maps, D):
    maps = maps[..., 1:, 1:]
    return maps / maps.sum(-1, keepdims=True) * D


def _with_cls(maps, D):
    return (maps * np.pad(D, ((1, 0), (1, 0)))).sum(-1)


mean_distance = Check(
    "mean_distance(maps, distances)",
    _mean_distance,
    _attention,
    {
        "CLS was left in: it has no place, and counts as distance 0": lambda maps, D: _with_cls(maps, D).mean(
            (0, 2)
        ),
        "CLS was left out, but what remains of each row no longer sums to 1": lambda maps, D: _mean_distance(
            maps, D, keep_cls=True
        ),
        "the wrong token was left out: CLS comes first, not last": lambda maps, D: _mean_distance(
            np.roll(maps, 1, (2, 3)), D
        ),
        "the last token was left out in place of CLS, and the rows not scaled to sum 1": lambda maps, D: (
            (maps[..., :-1, :-1] * D).sum(-1).mean((0, 2))
        ),
        "heads were averaged before the distance, so that they cannot be told apart": lambda maps, D: (
            _weighted(maps, D).sum(-1).mean()
        ),
        "heads were averaged: one number for each head is needed": lambda maps, D: np.full(
            maps.shape[1], _weighted(maps, D).sum(-1).mean()
        ),
        "images were not averaged": lambda maps, D: _weighted(maps, D).sum(-1).mean(2),
        "images were kept and heads averaged": lambda maps, D: _weighted(maps, D).sum(-1).mean((1, 2)),
        "you averaged over keys where the weighted sum was needed": lambda maps, D: _weighted(maps, D).mean(
            (0, 2, 3)
        ),
        "you summed over queries where the mean was needed": lambda maps, D: (
            _weighted(maps, D).sum((2, 3)).mean(0)
        ),
        "queries and keys are exchanged: a query's row sums to 1, not a key's column": lambda maps, D: (
            _mean_distance(maps.swapaxes(2, 3), D)
        ),
        "you took the distance to the most attended patch only": lambda maps, D: np.take_along_axis(
            np.broadcast_to(D, maps[..., 1:, 1:].shape), maps[..., 1:, 1:].argmax(-1)[..., None], -1
        ).mean((0, 2, 3)),
        "the weights play no part: this is the mean of all distances": lambda maps, D: np.full(
            maps.shape[1], D.mean()
        ),
        "the maps were scaled as a whole, not row by row": lambda maps, D: (
            (maps[..., 1:, 1:] * D).sum((0, 2, 3)) / maps[..., 1:, 1:].sum((0, 2, 3))
        ),
        "the softmax was taken again: the maps are weights already": lambda maps, D: (
            (np.exp(maps[..., 1:, 1:]) / np.exp(maps[..., 1:, 1:]).sum(-1, keepdims=True) * D)
            .sum(-1)
            .mean((0, 2))
        ),
    },
    {
        "attention to CLS changes your result: scale what is left of each row to sum 1": lambda maps, D: (
            _less_cls(maps),
            D,
        ),
        "your result depends on the order of the images": lambda maps, D: (maps[::-1].copy(), D),
        "what CLS attends to changes your result: leave its row out": lambda maps, D: (_turn_cls(maps), D),
    },
)


def _less_cls(maps):
    maps = maps.copy()
    maps[..., 1:, 0] /= 2
    maps[..., 1:, 1:] *= (1 - maps[..., 1:, :1]) / maps[..., 1:, 1:].sum(-1, keepdims=True)
    return maps


def _turn_cls(maps):
    maps = maps.copy()
    maps[..., 0, :] = maps[..., 0, ::-1]
    return maps


# Receptive fields


def _steps(field, y=None, x=None):
    rows, columns = np.indices(field.shape)
    y, x = ((size - 1) / 2 if at is None else at for size, at in zip(field.shape, (y, x), strict=True))
    return np.hypot(rows - y, columns - x)


def _reached(field, distances, goal):
    for distance in sorted(set(distances.ravel())):
        if field[distances <= distance + 1e-9].sum() >= goal - 1e-9 * field.sum():
            return distance
    return np.nan


def _radius(field, mass=0.5, *at):
    return _reached(field, _steps(field, *at), mass * field.sum())


def _fields(rng):
    def bump(height, width, reach, y=0.0, x=0.0):
        rows, columns = np.indices((height, width))
        squares = (rows - (height - 1) / 2 - y) ** 2 + (columns - (width - 1) / 2 - x) ** 2
        field = np.exp(-squares / (2 * reach**2)) * rng.uniform(0.5, 1.5, (height, width))
        return np.float32(field / field.sum() * rng.uniform(3, 9)).astype(float)

    yield "an odd size", (bump(15, 15, 2.6),)
    yield "an even size, whose middle lies between pixels", (bump(16, 16, 3),)
    yield "a field that is not square", (bump(9, int(rng.integers(20, 26)), 4),)
    middle = np.zeros((7, 7))
    middle[3, 3] = 2
    yield "everything in the middle pixel", (middle,)
    yield "the same value everywhere", (np.full((12, 12), 0.25),)
    half = np.zeros((9, 9))
    half[4, 4], half[0, 0], half[8, 8] = 2, 1, 1
    yield "exactly half in the middle pixel", (half,)
    yield "a field whose peak lies off the middle", (bump(17, 17, 2, 3, -2),)
    ring = (np.abs(_steps(np.zeros((21, 21))) - 7) < 0.8) * 0.125
    yield "a ring", (ring,)


def _peak(field):
    return np.unravel_index(field.argmax(), field.shape)


def _mass_centre(field):
    return [(field * index).sum() / field.sum() for index in np.indices(field.shape)]


radius = Check(
    "radius(field)",
    _radius,
    _fields,
    {
        "this is the diameter": lambda field: 2 * _radius(field),
        "the field was not brought to sum 1: half of its own sum is meant": lambda field: _reached(
            field, _steps(field), 0.5
        ),
        "half of the pixels, not half of the mass": lambda field: _radius(np.ones_like(field)),
        "the middle is half a pixel off: pixel centres run from 0 to the size less 1": (
            lambda field: _radius(field, 0.5, field.shape[0] / 2, field.shape[1] / 2),
            lambda field: _radius(field, 0.5, field.shape[0] // 2, field.shape[1] // 2),
            lambda field: _radius(field, 0.5, (field.shape[0] - 1) // 2, (field.shape[1] - 1) // 2),
        ),
        "more than half was asked for: at least half is enough": lambda field: _radius(field, 0.500001),
        "the radius is squared: a root is missing": lambda field: _radius(field) ** 2,
        "you measured from the peak; the middle of the image was asked for": lambda field: _radius(
            field, 0.5, *_peak(field)
        ),
        "you measured from the field's own centre of mass": lambda field: _radius(
            field, 0.5, *_mass_centre(field)
        ),
        "this is the mean distance, not the distance that holds half": lambda field: (
            (field * _steps(field)).sum() / field.sum()
        ),
        "this is the root mean square distance, not the distance that holds half": lambda field: np.sqrt(
            (field * _steps(field) ** 2).sum() / field.sum()
        ),
        "this is where the field falls to half of its peak; half of its sum was asked for": lambda field: (
            _steps(field)[field >= field.max() / 2].max()
        ),
        "the field was squared before it was summed": lambda field: _radius(field**2),
        "another share of the mass than half": lambda field: _radius(field, 0.9),
        "a square window was grown, not a disc": lambda field: _reached(
            field,
            np.max(
                np.abs(
                    [
                        index - (size - 1) / 2
                        for index, size in zip(np.indices(field.shape), field.shape, strict=True)
                    ]
                ),
                0,
            ),
            field.sum() / 2,
        ),
    },
    {
        "a multiple of the field gives another result: compare with its own sum": lambda field: (field * 3,),
        "upside down gives another result: is the middle right, do ties count together?": lambda field: (
            field[::-1].copy(),
        ),
        "mirrored gives another result: is the middle right, do ties count together?": lambda field: (
            field[:, ::-1].copy(),
        ),
    },
)


# Skips


def _norm(z, order=2):
    return np.linalg.norm(z, ord=order, axis=-1)


def _norm_ratios(z, f):
    n, t, _ = z.shape
    return np.array(
        [np.mean([sum(z[i, k] ** 2) ** 0.5 / sum(f[i, k] ** 2) ** 0.5 for i in range(n)]) for k in range(t)]
    )


def _streams(rng):
    def pair(n, t, d):
        sizes = rng.uniform(0.3, 4, (2, n, t, 1))
        return tuple(np.float32(rng.normal(size=(n, t, d)) * size + 0.3).astype(float) for size in sizes)

    n, t = (int(k) for k in rng.integers(4, 9, 2))
    yield f"{n} images, {t} tokens", pair(n, t, 6)
    yield "one image", pair(1, 5, 3)
    yield "one token", pair(6, 1, 4)
    yield "as many images as tokens", pair(5, 5, 8)
    yield "tokens of one number", pair(7, 3, 1)
    z, f = pair(4, 3, 5)
    yield "a class token ten times as long", (z * np.array([10, 1, 1])[:, None], f)


norm_ratios = Check(
    "norm_ratios(z, f)",
    _norm_ratios,
    _streams,
    {
        "upside down: the skip's norm goes above, the branch's below": lambda z, f: _norm_ratios(f, z),
        "this is the ratio of two means; the ratio comes first, token by token": lambda z, f: (
            _norm(z).mean(0) / _norm(f).mean(0)
        ),
        "the images were averaged before the norm: vectors cancel": lambda z, f: (
            _norm(z.mean(0)) / _norm(f.mean(0))
        ),
        "you averaged over tokens, and kept the images": lambda z, f: (_norm(z) / _norm(f)).mean(1),
        "the images were not averaged": lambda z, f: _norm(z) / _norm(f),
        "tokens were averaged too, so that CLS is hidden among the patches": lambda z, f: (
            _norm(z) / _norm(f)
        ).mean(),
        "one norm for all tokens of an image together": lambda z, f: np.mean(
            [np.linalg.norm(a) / np.linalg.norm(b) for a, b in zip(z, f, strict=True)]
        ),
        "the norm was taken over images or tokens, not over the width": lambda z, f: (
            np.linalg.norm(z, axis=0).mean(-1) / np.linalg.norm(f, axis=0).mean(-1)
        ),
        "one norm over images and width together": lambda z, f: (
            np.linalg.norm(z, axis=(0, 2)) / np.linalg.norm(f, axis=(0, 2))
        ),
        "the norms are squared: a root is missing": lambda z, f: (_norm(z) ** 2 / _norm(f) ** 2).mean(0),
        "this is the sum of absolute values, not the Euclidean norm": lambda z, f: (
            _norm(z, 1) / _norm(f, 1)
        ).mean(0),
        "this is the largest absolute value, not the Euclidean norm": lambda z, f: (
            _norm(z, np.inf) / _norm(f, np.inf)
        ).mean(0),
        "you compared with the block's output z + f(z), not with the branch f(z)": lambda z, f: _norm_ratios(
            z, z + f
        ),
        "you divided number by number before the norm": lambda z, f: _norm(z / f).mean(0),
        "this is the skip's share of both norms; the ratio of one to the other was asked for": (
            lambda z, f: (_norm(z) / (_norm(z) + _norm(f))).mean(0)
        ),
        "this is another mean (geometric or harmonic) than the plain one": (
            lambda z, f: np.exp(np.log(_norm(z) / _norm(f)).mean(0)),
            lambda z, f: 1 / (_norm(f) / _norm(z)).mean(0),
        ),
        "this is the largest ratio over the images, not their mean": lambda z, f: (
            (_norm(z) / _norm(f)).max(0)
        ),
        "the ratios were summed over the images, not averaged": lambda z, f: (_norm(z) / _norm(f)).sum(0),
        "this is the median, not the mean": lambda z, f: np.median(_norm(z) / _norm(f), 0),
        "this is the cosine of the angle between skip and branch": lambda z, f: (
            (z * f).sum(-1) / _norm(z) / _norm(f)
        ).mean(0),
        "the root mean square of the ratios, not their mean": lambda z, f: np.sqrt(
            ((_norm(z) / _norm(f)) ** 2).mean(0)
        ),
    },
    {
        "multiplying skip and branch by the same number changes your result": lambda z, f: (z * 3, f * 3),
        "your result depends on the order of the images": lambda z, f: (z[::-1].copy(), f[::-1].copy()),
        "turning a vector around changes your result: only its length counts": lambda z, f: (-z, f),
    },
)


# Localisation


def _sharpness(maps, own=lambda i, gh, gw: divmod(i, gw), others=np.mean, with_own=False):
    tokens, gh, gw = maps.shape
    result = []
    for i in range(tokens):
        row, column = own(i, gh, gw)
        rest = [maps[i, a, b] for a, b in _places((gh, gw)) if with_own or (a, b) != (row, column)]
        result.append(maps[i, row, column] - others(rest))
    return np.array(result)


def _maps(rng):
    def maps(gh, gw):
        far = _distances((gh, gw), 1).reshape(gh * gw, gh, gw)
        return np.float32(rng.uniform(0, 0.5, far.shape) + 0.5 * np.exp(-far)).astype(float)

    yield "a grid of 3 x 3", (maps(3, 3),)
    yield "a grid that is not square", (maps(2, 5),)
    yield "more rows than columns", (maps(int(rng.integers(5, 8)), 3),)
    yield "one row", (maps(1, 4),)
    blind = normal(rng, 9, 3, 3) * 0.1
    yield "tokens that do not know their place", (blind,)


def _in_deviations(maps, freedom=0):
    rest = [np.delete(m.ravel(), i) for i, m in enumerate(maps)]
    return _sharpness(maps) / [values.std(ddof=freedom) for values in rest]


sharpness = Check(
    "sharpness(maps)",
    _sharpness,
    _maps,
    {
        "the token's own patch was left in the mean of the rest": lambda maps: _sharpness(
            maps, with_own=True
        ),
        "own patches are looked up column by column; the tokens run row by row": lambda maps: _sharpness(
            maps, lambda i, gh, gw: divmod(i, gh)[::-1]
        ),
        "one patch too far: is CLS counted?": lambda maps: _sharpness(
            maps, lambda i, gh, gw: divmod((i + 1) % (gh * gw), gw)
        ),
        "one patch too early: is CLS counted?": lambda maps: _sharpness(
            maps, lambda i, gh, gw: divmod((i - 1) % (gh * gw), gw)
        ),
        "you took the largest value, wherever it is: is that the token's own patch?": lambda maps: (
            maps.max((1, 2)) - np.array([(m.sum() - m.max()) / (m.size - 1) for m in maps])
        ),
        "the largest value less the mean of all": lambda maps: maps.max((1, 2)) - maps.mean((1, 2)),
        "you compared with the best of the other patches, not with their mean": lambda maps: _sharpness(
            maps, others=max
        ),
        "you compared with the median of the others": lambda maps: _sharpness(maps, others=np.median),
        "this is the value at the own patch; what the other patches show is not taken off": lambda maps: (
            _sharpness(maps, others=lambda rest: 0)
        ),
        "you compared with the smallest of the other patches, not with their mean": lambda maps: _sharpness(
            maps, others=min
        ),
        "negative values lost their sign: a token may be less like its own patch": lambda maps: (
            np.abs(_sharpness(maps))
        ),
        "the own patch is always the first here; each token has its own": lambda maps: _sharpness(
            maps, lambda i, gh, gw: (0, 0)
        ),
        "a ratio, where the difference was asked for": lambda maps: np.array(
            [m.ravel()[i] / np.delete(m.ravel(), i).mean() for i, m in enumerate(maps)]
        ),
        "the sign is wrong: own patch less the rest": lambda maps: -_sharpness(maps),
        "the tokens were averaged: one number for each is needed": lambda maps: _sharpness(maps).mean(),
        "the mean of the rest was divided by the number of all patches": lambda maps: np.array(
            [m.ravel()[i] - np.delete(m.ravel(), i).sum() / m.size for i, m in enumerate(maps)]
        ),
        "the mean was taken over all tokens' maps together": lambda maps: (
            np.array([m.ravel()[i] for i, m in enumerate(maps)]) - maps.mean()
        ),
        "divided by the spread of the rest, which was not asked for": (
            _in_deviations,
            lambda maps: _in_deviations(maps, 1),
        ),
    },
    {"adding a constant to all maps changes your result: it is a difference": lambda maps: (maps + 0.3,)},
)


# Probes


def _ridge(X, y, Z, classes, l2, low=-1, test=None, bias=True, scale=True, freedom=0, centre=True):
    """Scores (m, c) of a ridge probe fitted to (n, d) and y, for Z (m, d); each slip is an argument."""
    source = Z if test else X
    mean, deviation = (X.mean(0), X.std(0, ddof=freedom)) if scale else (X.mean(0) * centre, 1)
    X = (X - mean) / deviation
    if test:
        mean, deviation = source.mean(0), source.std(0)
    T = np.where(y[:, None] == np.arange(classes), 1.0, low)
    offset = T.mean(0) * bias
    weight = np.linalg.solve(X.T @ X + l2 * np.eye(X.shape[1]), X.T @ (T - offset))
    return (Z - mean) / deviation @ weight + offset


def _penalised_bias(X, y, Z, classes, l2):
    mean, deviation = X.mean(0), X.std(0)
    X, Z = (np.c_[(A - mean) / deviation, np.ones(len(A))] for A in (X, Z))
    T = np.where(y[:, None] == np.arange(classes), 1.0, -1.0)
    return Z @ np.linalg.solve(X.T @ X + l2 * np.eye(X.shape[1]), X.T @ T)


def _labelled(rng):
    def sets(n, d, m, classes, l2):
        y, labels = (rng.permutation(np.arange(k) % classes) for k in (n, m))
        centres = rng.normal(size=(classes, d)) * 2
        size = rng.uniform(0.3, 3, d)
        X, Z = ((centres[k] + rng.normal(size=(len(k), d)) + 1) * size for k in (y, labels))
        return np.float32(X).astype(float), y, np.float32(Z).astype(float), classes, l2

    yield "40 images, 5 features, 3 classes", sets(41, 5, 9, 3, 10.0)
    yield "more features than images", sets(12, 20, 7, 4, 2.0)
    yield "two classes, one feature", sets(15, 1, 6, 2, 1.0)
    yield "a strong penalty", sets(int(rng.integers(25, 40)), 6, 8, 3, 300.0)


ridge = Check(
    "ridge(X, y, Z, classes, l2)",
    _ridge,
    _labelled,
    {
        "the targets are 0 and 1; they were to be −1 and 1": lambda *a: _ridge(*a, low=0),
        "the test images were standardised with their own statistics, not the training images'": lambda *a: (
            _ridge(*a, test=True)
        ),
        "the features were centred, but not brought to deviation 1": lambda *a: _ridge(*a, scale=False),
        "the features were not standardised": lambda *a: _ridge(*a, scale=False, centre=False),
        "the features were neither centred nor scaled, and there is no bias": lambda *a: _ridge(
            *a, scale=False, centre=False, bias=False
        ),
        "there is no bias": lambda *a: _ridge(*a, bias=False),
        "the bias was penalised like the weights": _penalised_bias,
        "the penalty is missing": lambda X, y, Z, c, l2: _ridge(X, y, Z, c, 1e-9),
        "the penalty was multiplied by the number of images": lambda X, y, Z, c, l2: _ridge(
            X, y, Z, c, l2 * len(X)
        ),
        "the penalty was divided by the number of images": lambda X, y, Z, c, l2: _ridge(
            X, y, Z, c, l2 / len(X)
        ),
        "the penalty was squared": lambda X, y, Z, c, l2: _ridge(X, y, Z, c, l2**2),
        "the penalty was inverted, or its root taken": (
            lambda X, y, Z, c, l2: _ridge(X, y, Z, c, 1 / l2),
            lambda X, y, Z, c, l2: _ridge(X, y, Z, c, l2**0.5),
        ),
        "the penalty was doubled or halved": (
            lambda X, y, Z, c, l2: _ridge(X, y, Z, c, l2 * 2),
            lambda X, y, Z, c, l2: _ridge(X, y, Z, c, l2 / 2),
        ),
        "the penalty is always 1: l2 plays no part": lambda X, y, Z, c, l2: _ridge(X, y, Z, c, 1.0),
        "the deviation divides by n − 1; the exercise says n": lambda *a: _ridge(*a, freedom=1),
        "these are labels; scores for every class were asked for": lambda *a: _ridge(*a).argmax(1),
        "scores of the training images; those of Z were asked for": lambda X, y, Z, c, l2: _ridge(
            X, y, X, c, l2
        ),
        "the scores were turned into probabilities": lambda *a: (
            np.exp(_ridge(*a)) / np.exp(_ridge(*a)).sum(1, keepdims=True)
        ),
    },
    {
        "a multiple of the features gives another result: standardise them first": lambda X, y, Z, c, l2: (
            X * 4,
            y,
            Z * 4,
            c,
            l2,
        ),
        "features plus a constant give another result: standardise them first": lambda X, y, Z, c, l2: (
            X + 2,
            y,
            Z + 2,
            c,
            l2,
        ),
        "your result depends on the order of the training images": lambda X, y, Z, c, l2: (
            X[::-1].copy(),
            y[::-1].copy(),
            Z,
            c,
            l2,
        ),
    },
)
