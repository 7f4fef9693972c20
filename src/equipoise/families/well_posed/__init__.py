"""Well-posed implicit networks: one equilibrium by a bound of the entries of `A`."""

from equipoise.families.well_posed.bound import perron_bound, project_rows
from equipoise.families.well_posed.cell import Condition, Norm, WellPosedCell
from equipoise.families.well_posed.layer import WellPosed, to_infinity_norm
from equipoise.families.well_posed.models import WellPosedOptions

__all__ = [
    "Condition",
    "Norm",
    "WellPosed",
    "WellPosedCell",
    "WellPosedOptions",
    "perron_bound",
    "project_rows",
    "to_infinity_norm",
]
