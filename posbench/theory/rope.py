"""What RoPE adds to the causal mask, one angle at a time (Wu et al. 2025, Lemma 4.6 and Theorem 4.7).

Heads of two coordinates: the score of query i and key j is b cos(phi - (i - j) theta), where b is the product
of both lengths, scaled as scores are, and phi the angle between both before the rotation. t counts layers
from 0 in the paper, ``layers`` from 1.
"""

from __future__ import annotations

import numpy as np
import scipy
from numpy.typing import ArrayLike, NDArray

Array = NDArray[np.float64]


def scores(n: int, theta: float, b: ArrayLike, phi: ArrayLike = 0.0) -> Array:
    """Scores of every query and key, [n, n]; angles in radians, ``b`` and ``phi`` numbers or [n, n]."""
    distance = np.subtract.outer(np.arange(n), np.arange(n))
    return np.asarray(b) * np.cos(np.asarray(phi) - distance * theta)


def bounds(
    n: int, theta: float, low: float, high: float, delta: float = 0.0
) -> tuple[Array, Array]:
    """Bounds of one layer's causal attention, both [n, n], 0 above the diagonal (Lemma 4.6).

    They have the form C e^(-c (i - j)^2 theta^2), with c = ``high`` / 2 below and 2 ``low`` / pi^2 above:
    from 0 to pi, 1 - cos(x) lies between 2 x^2 / pi^2 and x^2 / 2. C is a row's own, as its softmax is. Any b
    is from ``low`` (0 or more) to ``high``, any phi within ``delta`` times theta.

    Raises:
        ValueError: (delta + n - 1) theta is above pi, where the cosine rises again and the lemma is silent.
    """
    if (delta + n - 1) * theta > np.pi:
        raise ValueError(
            f"(delta + n - 1) theta = {(delta + n - 1) * theta:.3g} is above pi"
        )
    distance = np.subtract.outer(np.arange(n), np.arange(n)).astype(np.float64)
    seen = distance >= 0
    steep = high / 2 * theta**2
    flat = 2 * low / np.pi**2 * theta**2
    least = np.where(seen, np.exp(low - steep * (distance + delta) ** 2), 0).sum(
        1, keepdims=True
    )
    most = np.where(
        seen, np.exp(high - flat * np.maximum(distance - delta, 0) ** 2), 0
    ).sum(1, keepdims=True)
    lower = (
        np.exp(low - steep * (2 * (n - 1) * delta + delta**2))
        / most
        * np.exp(-steep * distance**2)
    )
    upper = (
        np.exp(high + flat * 2 * (n - 1) * delta) / least * np.exp(-flat * distance**2)
    )
    return np.where(seen, lower, 0), np.where(seen, np.minimum(upper, 1), 0)


def law(layers: int, width: float, distance: ArrayLike) -> Array:
    """Logarithm of binom(t + x, x) e^(-c x^2 theta^2), Theorem 4.7's closed form, at distances x in tokens.

    c theta^2 = 1 / (2 width^2), with the ``width`` of one layer's attention (its standard deviation in
    tokens). The theorem's Theta hides that c may be down to a (t + 1)-th of that: t + 1 factors share the
    distance.
    """
    x = np.asarray(distance, dtype=np.float64)
    t = layers - 1
    return (
        scipy.special.gammaln(t + x + 1)
        - scipy.special.gammaln(x + 1)
        - scipy.special.gammaln(t + 1)
        - x**2 / (2 * width**2)
    )


def peak(layers: int, width: float) -> int:
    """Distance of the largest value of :func:`law`, in tokens: it grows as sqrt(t), and with the width."""
    # Its slope is below t / x - x / width^2, so the peak lies before sqrt(t) width.
    return int(law(layers, width, np.arange(int(np.sqrt(layers) * width) + 2)).argmax())


def stationary(layers: int, width: float, printed: float | None = None) -> float:
    """Where Stirling's L'(x) = log((t + x) / x) - 2 c theta^2 x is 0, in tokens, for 2 layers or more.

    Differs from source: Appendix H prints 2 c theta x, kept with the angle theta as ``printed``.
    """
    t = layers - 1
    slope = 1 / width**2 / (printed or 1.0)
    return float(
        scipy.optimize.brentq(
            lambda x: np.log1p(t / x) - slope * x, 1e-9, np.sqrt(t / slope) + 1
        )
    )


def drift(layers: int, width: float) -> float:
    """Mean distance after so many layers, in tokens, if each goes back by the mean of half a Gaussian."""
    return layers * width * np.sqrt(2 / np.pi)
