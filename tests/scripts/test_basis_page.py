"""The page of bases: its cells are ratios of losses, its verdict is what the fits say."""

from kernels.formats.basis_fit import Loss
from scripts import basis_page
from scripts.tasks import basis_page as work


def test_the_page_says_what_the_fits_say(tmp_path):
    page = tmp_path / "page.md"
    assert basis_page.main(["--tokens", "1024", "--page", str(page)]) == 0
    text = page.read_text()
    assert "command: python -m scripts.basis_page --tokens 1024" in text
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| ") and "K |" in line]
    assert len(rows) == 2 * len(work.CONTEXTS)
    bold = sum(cell.startswith("**") for row in rows for cell in row[1:])
    assert ("**A basis is used nowhere" in text) == (bold == 0)


def test_a_cell_is_the_ratio_of_losses():
    class Fitted:
        based, rotated, pays = Loss(1.0, 2.0, 6.0), Loss(2.0, 2.0, 3.0), True

    assert work.cell(Fitted) == "**0.50, 1.00, 2.00**"
    Fitted.pays = False
    assert work.cell(Fitted) == "0.50, 1.00, 2.00"
    Fitted.based, Fitted.why_none = None, "too few entries: 3, wants 256"
    assert work.cell(Fitted) == "too few entries: 3, wants 256"
