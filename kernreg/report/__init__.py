"""`kernreg report`: one HTML page of what was measured, what the policy takes of it, and what that costs.

collect.py turns results, a policy and a registry into what data.py describes; chart.py draws one chart; page.py makes the page.
"""
