"""The formats that can be enforced, as regular languages."""

from collections.abc import Callable

from ..expressions import Expressions
from ..regex_syntax import compile_regex
from .host_names import host_name, international_host_name

_YEAR = "[0-9]{4}"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_OFFSET = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_FRACTION = "(?:\\.[0-9]{1,18})?"
_TIME = f"(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]{_FRACTION}{_OFFSET}"
# A mail domain's labels are not counted: each count would be a state.
_LABEL = "[A-Za-z0-9](?:[A-Za-z0-9-]*[A-Za-z0-9])?"
_HOST = f"{_LABEL}(?:\\.{_LABEL})*"
_OCTET = "(?:25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
_IPV4 = f"{_OCTET}(?:\\.{_OCTET}){{3}}"
_H16 = "[0-9A-Fa-f]{1,4}"
_LS32 = f"(?:{_H16}:{_H16}|{_IPV4})"
_IPV6 = "(?:" + "|".join(
    [
        f"(?:{_H16}:){{6}}{_LS32}",
        f"::(?:{_H16}:){{5}}{_LS32}",
        f"(?:{_H16})?::(?:{_H16}:){{4}}{_LS32}",
        f"(?:(?:{_H16}:){{0,1}}{_H16})?::(?:{_H16}:){{3}}{_LS32}",
        f"(?:(?:{_H16}:){{0,2}}{_H16})?::(?:{_H16}:){{2}}{_LS32}",
        f"(?:(?:{_H16}:){{0,3}}{_H16})?::{_H16}:{_LS32}",
        f"(?:(?:{_H16}:){{0,4}}{_H16})?::{_LS32}",
        f"(?:(?:{_H16}:){{0,5}}{_H16})?::{_H16}",
        f"(?:(?:{_H16}:){{0,6}}{_H16})?::",
    ]
) + ")"  # fmt: skip
_ATEXT = "[A-Za-z0-9!#$%&'*+/=?^_`{|}~-]"
_QUOTED = '"(?:[ !#-\\[\\]-~]|\\\\[ -~])*"'
_EMAIL = f"(?:{_ATEXT}+(?:\\.{_ATEXT}+)*|{_QUOTED})@(?:{_HOST}|\\[(?:{_IPV4}|[Ii][Pp][Vv]6:{_IPV6})\\])"
_HEX = "[0-9A-Fa-f]"


def _uri(extra: str, private: str, *, absolute: bool) -> str:
    """A URI of RFC 3986, or an IRI of RFC 3987 with ``extra`` characters, and ``private`` ones in its query.

    Unless ``absolute``, a relative reference too.
    """
    plain = f"[A-Za-z0-9._~!$&'()*+,;=:@{extra}-]"
    pchar = f"(?:{plain}|%{_HEX}{{2}})"
    no_colon = f"(?:[A-Za-z0-9._~!$&'()*+,;=@{extra}-]|%{_HEX}{{2}})"
    user = f"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:{extra}-]|%{_HEX}{{2}})*@)?"
    literal = f"\\[(?:{_IPV6}|v[0-9A-Fa-f]+\\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\\]"
    host = f"(?:{literal}|(?:[A-Za-z0-9._~!$&'()*+,;={extra}-]|%{_HEX}{{2}})*)"
    authority = f"//{user}{host}(?::[0-9]*)?(?:/{pchar}*)*"
    rooted = f"/(?:{pchar}+(?:/{pchar}*)*)?"
    in_query = f"(?:{plain[:-1]}/?{private}]|%{_HEX}{{2}})" if private else f"(?:{pchar}|[/?])"
    tail = f"(?:\\?{in_query}*)?(?:#(?:{pchar}|[/?])*)?"
    scheme = "[A-Za-z][A-Za-z0-9+.-]*:"
    rootless = f"(?:{pchar}+(?:/{pchar}*)*)?"
    if absolute:
        return f"{scheme}(?:{authority}|{rooted}|{rootless}){tail}"
    return f"(?:(?:{scheme})?(?:{authority}|{rooted})|{scheme}{rootless}|{no_colon}+(?:/{pchar}*)*|){tail}"


_PLANES = "".join(f"{chr(plane << 16)}-{chr(plane << 16 | 0xFFFD)}" for plane in range(1, 14))
_INTERNATIONAL = f"\\u00A0-\\uD7FF\\uF900-\\uFDCF\\uFDF0-\\uFFEF{_PLANES}\U000e1000-\U000efffd"
_PRIVATE = "\ue000-\uf8ff\U000f0000-\U000ffffd\U00100000-\U0010fffd"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_CLOCK_SPAN = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_ENCODED = f"%{_HEX}{{2}}"
_LITERAL = f"(?:[!#$&'(-;=?-\\[\\]_a-z~{_INTERNATIONAL}{_PRIVATE}]|{_ENCODED})"
_VARIABLE_CHAR = f"(?:[A-Za-z0-9_]|{_ENCODED})"
_VARIABLE = f"{_VARIABLE_CHAR}(?:\\.?{_VARIABLE_CHAR})*(?::[1-9][0-9]{{0,3}}|\\*)?"

_REGEXES: dict[str, str] = {
    "date": _DATE,
    "duration": f"P(?:{_DAYS}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|[0-9]+W)",
    "email": _EMAIL,
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _uri("", "", absolute=True),
    "uri-reference": _uri("", "", absolute=False),
    "uri-template": f"(?:{_LITERAL}|\\{{[+#./;?&=,!@|]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*",  # RFC 6570
    "iri": _uri(_INTERNATIONAL, _PRIVATE, absolute=True),
    "iri-reference": _uri(_INTERNATIONAL, _PRIVATE, absolute=False),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}


def _regex(pattern: str, ex: Expressions) -> int:
    return compile_regex(pattern, ex, anchored=True, ecma=True)


def _time(ex: Expressions) -> int:
    return ex.union(_regex(_TIME, ex), _leap_second(ex))


def _leap_second(ex: Expressions) -> int:
    """The second 60 at 23:59 in UTC (RFC 3339, section 5.7), in the time zones that whole quarters of an hour apart."""
    second = ex.concat(ex.literal(b":60"), _regex(_FRACTION, ex))
    hours = []
    for hour in range(24):
        minutes = []
        for minute in (14, 29, 44, 59):
            ahead = (hour * 60 + minute + 1) % 1440  # of 23:59 in UTC, that is, of the day before
            offsets = [b"%c%02d:%02d" % (sign, *divmod(by, 60)) for sign, by in ((0x2B, ahead), (0x2D, -ahead % 1440))]
            offset = ex.one_of([*offsets, b"Z", b"z"] if ahead == 0 else offsets)
            minutes.append(ex.concat(ex.literal(b"%02d" % minute), second, offset))
        hours.append(ex.concat(ex.literal(b"%02d:" % hour), ex.union(*minutes)))
    return ex.union(*hours)


def _international_email(ex: Expressions) -> int:
    # U+FFFD stands for bytes that were no character
    return ex.concat(_regex('[^@\\s"(),:;<>\\[\\\\\\]\\uFFFD]+@', ex), international_host_name(ex))


_BUILT: dict[str, Callable[[Expressions], int]] = {
    "time": _time,
    "date-time": lambda ex: ex.concat(_regex(f"{_DATE}[Tt ]", ex), _time(ex)),
    "hostname": host_name,
    "idn-hostname": international_host_name,
    "idn-email": _international_email,
}
FORMATS = frozenset((*_REGEXES, *_BUILT))


def format_language(name: str, ex: Expressions) -> int:
    """The texts of a format in ``FORMATS``. ``ex`` keeps them, but each call builds them again."""
    return _BUILT[name](ex) if name in _BUILT else _regex(_REGEXES[name], ex)
