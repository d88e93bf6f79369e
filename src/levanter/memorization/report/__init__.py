"""The report: one self-contained HTML file, without references to other files or servers."""

from levanter.memorization.report.page import report_html as report_html
