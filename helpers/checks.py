"""Checkers for the exercises: hand in your function, read "passed" or the likely mistake.

    from helpers import checks
    checks.hsic(my_hsic)

prints `passed: hsic is right in 6 cases of 6`, or `not yet: ` and a hint, never the value that was expected.
Functions may be written with torch or numpy, in float32 or float64; they get tensors (numpy arrays if they
cannot take those). `checks.hsic.call` is the signature, `checks.hsic.hint(f)` returns the hint and
`checks.hsic.require(f)` raises it, both with a `seed` for other cases. A checker cannot stop a function that
never returns: interrupt the kernel.

How it works is in `helpers.checking`; what is checked in `checks_depth`, `checks_similarity` and
`checks_networks`, one row a checker: a slow, obvious specification; cases; what goes wrong. The
specifications import none of the course's own measures, so they check those too.
"""

from .checks_depth import closest_depth, unpatchify
from .checks_networks import mean_distance, norm_ratios, patch_distances, radius, ridge, sharpness
from .checks_similarity import centred_gram, centring, cka, cka_biased, hsic, hsic1, minibatch_cka

__all__ = ["unpatchify", "closest_depth", "centring", "centred_gram", "hsic", "hsic1", "cka", "cka_biased",
           "minibatch_cka", "patch_distances", "mean_distance", "radius", "norm_ratios", "sharpness", "ridge"]
