"""The formats that can be enforced, as regexes."""

_YEAR = "[0-9]{4}"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP}-02-29)"
)
_OFFSET = "(?:[Zz]|[+-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\\.[0-9]{1,9})?"
_TIME = f"{_CLOCK}{_OFFSET}"
# The standard allows a label 63 characters. They are not counted: each count would be a state.
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
_EMAIL = f'(?:{_ATEXT}+(?:\\.{_ATEXT}+)*|"(?:[^"\\\\\\r\\n]|\\\\.)+")@(?:{_HOST}|\\[(?:{_IPV4}|IPv6:{_IPV6})\\])'
_HEX = "[0-9A-Fa-f]"


def _uri(extra: str, *, absolute: bool) -> str:
    """A URI of RFC 3986, or with ``extra`` characters of RFC 3987; unless ``absolute``, a relative reference too."""
    plain = f"[A-Za-z0-9._~!$&'()*+,;=:@{extra}-]"
    pchar = f"(?:{plain}|%{_HEX}{{2}})"
    no_colon = f"(?:[A-Za-z0-9._~!$&'()*+,;=@{extra}-]|%{_HEX}{{2}})"
    user = f"(?:(?:[A-Za-z0-9._~!$&'()*+,;=:{extra}-]|%{_HEX}{{2}})*@)?"
    literal = f"\\[(?:{_IPV6}|v[0-9A-Fa-f]+\\.[A-Za-z0-9._~!$&'()*+,;=:-]+)\\]"
    host = f"(?:{literal}|(?:[A-Za-z0-9._~!$&'()*+,;={extra}-]|%{_HEX}{{2}})*)"
    authority = f"//{user}{host}(?::[0-9]*)?(?:/{pchar}*)*"
    rooted = f"/(?:{pchar}+(?:/{pchar}*)*)?"
    tail = f"(?:\\?(?:{pchar}|[/?])*)?(?:#(?:{pchar}|[/?])*)?"
    full = f"[A-Za-z][A-Za-z0-9+.-]*:(?:{authority}|{rooted}|{pchar}+(?:/{pchar}*)*|)"
    if absolute:
        return f"{full}{tail}"
    return f"(?:{full}|{authority}|{rooted}|{no_colon}+(?:/{pchar}*)*|){tail}"


_INTERNATIONAL = "\\u00A0-\\uD7FF\\uF900-\\uFDCF\\uFDF0-\\uFFEF"
_ILABEL = f"[A-Za-z0-9{_INTERNATIONAL}](?:[A-Za-z0-9{_INTERNATIONAL}-]*[A-Za-z0-9{_INTERNATIONAL}])?"
_POINTER = "(?:/(?:[^/~]|~[01])*)*"
_DAYS = "(?:[0-9]+D|[0-9]+M(?:[0-9]+D)?|[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?)"
_CLOCK_SPAN = "T(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"

# The standard's ``regex`` and ``uri-template`` are no regular languages: annotations, as any unknown name is.
FORMATS: dict[str, str] = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}[Tt ]{_TIME}",
    "duration": f"P(?:{_DAYS}(?:{_CLOCK_SPAN})?|{_CLOCK_SPAN}|[0-9]+W)",
    "email": _EMAIL,
    "idn-email": f'[^@\\s"(),:;<>\\[\\\\\\]]+@(?:{_ILABEL}(?:\\.{_ILABEL})*)',
    "hostname": _HOST,
    "idn-hostname": f"{_ILABEL}(?:\\.{_ILABEL})*",
    "ipv4": _IPV4,
    "ipv6": _IPV6,
    "uri": _uri("", absolute=True),
    "uri-reference": _uri("", absolute=False),
    "iri": _uri(_INTERNATIONAL, absolute=True),
    "iri-reference": _uri(_INTERNATIONAL, absolute=False),
    "uuid": f"{_HEX}{{8}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{4}}-{_HEX}{{12}}",
    "json-pointer": _POINTER,
    "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
}
