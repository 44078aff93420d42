"""The CSS of a page. Every rule applies inside ``.phloem`` only."""

from __future__ import annotations

from .palette import ORIGINS


def rgb(color: tuple[int, int, int]) -> str:
    return f"rgb({','.join(map(str, color))})"


def _origins() -> str:
    given = ("prompt", "cached")
    return "".join(
        f".phloem .o-{origin}{{background:rgba({r},{g},{b},{0.12 if origin in given else 0.22})}}"
        for origin, (_, (r, g, b), _) in ORIGINS.items()
    )


_RULES = """
.phloem{font:14px/1.5 system-ui,sans-serif;color:#1e293b;color-scheme:light}
main.phloem{max-width:1500px;margin:0 auto;padding:24px}
.phloem h1{font-size:22px;margin:0 0 12px}
.phloem h2{font-size:15px;margin:0 0 8px}
.phloem small{color:#64748b;font-size:11px}
.phloem section,.phloem.fragment,.phloem .tiles div{background:#fff;border:1px solid #e2e8f0;border-radius:10px}
.phloem section,.phloem.fragment{padding:14px;margin-bottom:16px;min-width:0}
.phloem .tiles{display:flex;flex-wrap:wrap;gap:10px;margin-bottom:16px}
.phloem .tiles div{padding:8px 14px;font-size:12px;color:#64748b}
.phloem .tiles b{display:block;font-size:19px;color:#1e293b}
.phloem .two{display:grid;grid-template-columns:minmax(320px,2fr) minmax(420px,3fr);gap:16px}
@media(max-width:900px){.phloem .two{grid-template-columns:1fr}}
.phloem .scroll{max-height:460px;overflow:auto}
.phloem .graph svg{display:block}
.phloem .legend{display:flex;flex-wrap:wrap;gap:4px 16px;font-size:12px;color:#475569;margin-bottom:8px}
.phloem .legend i{display:inline-block;width:12px;height:12px;border-radius:3px;margin-right:5px;vertical-align:-1px}
.phloem .legend label{margin-left:auto;display:flex;align-items:center;gap:6px}
.phloem .row{display:flex;align-items:center;height:22px;width:calc(100% * var(--zoom,1));font-size:12px}
.phloem .row{color:inherit;text-decoration:none}
.phloem a.row:hover .bar{background:#e0e7ff}
.phloem .label,.phloem .counts{position:sticky;flex:none;white-space:nowrap;background:#fff;z-index:1}
.phloem .label{left:0;width:120px;overflow:hidden;text-overflow:ellipsis;padding-right:8px}
.phloem .counts{right:0;width:124px;text-align:right;color:#475569;font-variant-numeric:tabular-nums}
.phloem .bar{position:relative;flex:1;height:14px;background:#f1f5f9;border-radius:3px}
.phloem .bar i{position:absolute;top:0;bottom:0;min-width:1px}
.phloem .ticks{background:none;font-size:11px;color:#64748b}
.phloem .ticks span{position:absolute;transform:translateX(-50%);white-space:nowrap}
.phloem .ticks span:first-child{transform:none}
.phloem .ticks span:last-child{transform:translateX(-100%)}
.phloem details{border-top:1px solid #e2e8f0;padding:6px 0}
.phloem summary{cursor:pointer;font-weight:600;font-size:13px}
.phloem .text{white-space:pre-wrap;overflow-wrap:anywhere;font:13px/1.7 ui-monospace,monospace;padding:6px 0}
.phloem .text{max-height:520px;overflow:auto}
.phloem .text i{font-style:normal;border-radius:2px}
.phloem .text .op{border-bottom:2px solid #94a3b8;scroll-margin:80px}
.phloem .text .op:target{outline:2px solid #6366f1;border-radius:3px}
.phloem .text .op::before{content:attr(data-name);font:600 10px system-ui,sans-serif;color:#fff;background:#64748b}
.phloem .text .op::before{border-radius:3px;padding:0 4px;margin:0 3px}
.phloem .other{display:block;margin-left:24px;opacity:.8}
.phloem .other small{margin-right:8px}
.phloem .error{color:#b91c1c;margin:4px 0}
.phloem .note,.phloem .cost{color:#64748b;font-size:12px;margin:4px 0}
"""

STYLE = _RULES.replace("\n", "") + _origins()
