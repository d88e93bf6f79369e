"""The report: one self-contained HTML file, which needs nothing else, now or in ten years."""

from levanter.memorization.report.page import report_html as report_html
