"""Maximum likelihood linear transform: axes on which diagonal covariances fit best.

Also known as semi-tied covariances (Gales 1999, "Semi-tied covariance matrices for
hidden Markov models"). Frames x of class c, of which there are n_c with the covariance
S_c, are modelled by Gaussians with diagonal covariance on A x. Up to constants their
log-likelihood is

    L(A) = Σ_c n_c · (log |det A| - 1/2 · Σ_d log a_d S_c a_dᵀ)

with a_d the rows of A. It is raised one row at a time. With the variances
v_cd = a_d S_c a_dᵀ held, G_d = Σ_c n_c / v_cd · S_c and p the row of A^-T, the best row

    a_d = p G_d⁻¹ · sqrt(Σ_c n_c / (p G_d⁻¹ pᵀ))
"""

import numpy as np

_LEAST_VARIANCE = 1e-4  # times the mean of all classes, against too few frames


def diagonalising(
    covariances: np.ndarray, frames: np.ndarray, num_sweeps: int = 20
) -> np.ndarray:
    """The axes A, float64 [dimension, dimension]; A x is to be modelled.

    Args:
        covariances: S_c, [classes, dimension, dimension].
        frames: n_c, [classes]; classes without frames are ignored.
        num_sweeps: Number of sweeps over the rows.

    Raises:
        ValueError: Some direction does not vary within any class.
    """
    seen = frames > 0
    covariances, frames = covariances[seen], frames[seen]
    spread = np.einsum("c,cij->ij", frames, covariances) / frames.sum()
    if np.linalg.eigvalsh(spread)[0] <= 0:
        raise ValueError(
            "`covariances` must span every direction in at least one class"
        )
    floor = _LEAST_VARIANCE * np.trace(spread) / len(spread)
    axes = np.eye(len(spread))
    for _ in range(num_sweeps):
        for row in range(len(axes)):
            axes[row] = _best_row(axes, row, covariances, frames, floor)
    return axes


def _best_row(
    axes: np.ndarray,
    row: int,
    covariances: np.ndarray,
    frames: np.ndarray,
    floor: float,
) -> np.ndarray:
    old = axes[row]
    variances = np.maximum(np.einsum("i,cij,j->c", old, covariances, old), floor)
    weighted = np.einsum("c,cij->ij", frames / variances, covariances)
    cofactors = np.linalg.inv(axes)[:, row]
    found = np.linalg.solve(weighted, cofactors)
    return found * np.sqrt(frames.sum() / (cofactors @ found))
