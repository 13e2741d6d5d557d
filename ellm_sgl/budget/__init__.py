"""A budget of bytes that servers of one machine share: a file, a row per process, no daemon."""

from ellm_sgl.budget.file import FOLDER, LedgerBusyError, LedgerError, path_of
from ellm_sgl.budget.layout import Row
from ellm_sgl.budget.ledger import Member, Standing, hold
from ellm_sgl.budget.listing import Budget, Sharer, check_budget, list_budgets
from ellm_sgl.budget.share import Claim, fair_shares
from ellm_sgl.budget.waker import Waker

__all__ = [
    "FOLDER",
    "Budget",
    "Claim",
    "LedgerBusyError",
    "LedgerError",
    "Member",
    "Row",
    "Sharer",
    "Standing",
    "Waker",
    "check_budget",
    "fair_shares",
    "hold",
    "list_budgets",
    "path_of",
]
