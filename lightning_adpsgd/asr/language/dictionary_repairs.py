"""Corrections and additions to the MS-State dictionary `sw-ms98-dict.text`.

The entries that Kaldi's recipe for Switchboard patches, as two tables: removed
pronunciations and added ones (`egs/swbd/s5c/local/dict.patch` there, Apache-2.0).
"""

from collections.abc import Iterator

Entry = tuple[str, tuple[str, ...]]

_TAKEN_AWAY = """
April ey p r ih l, B ay zh aa n iy z, Battle b ae t el, Creek k r ih k, Erie ih r iy,
Forever f ax r eh v er, NAACP eh ey ey s iy p iy, NIT eh ay t iy,
NTSC eh t iy eh s s iy, Texan t eh k sh ih n, Texan's t eh k sh ih n s, Waco w ae k ow,
bottle b aa t el, camera's k ae m ax r ax z, cameras k ae m ax r ax z,
forever f ax r eh v er, forget f ow r g eh t, huh-uh hh ah hh ah, hum-um hh m hh m,
nobody n ow b aa d iy, nobody'll n ow b aa d iy l, nobody's n ow b aa d iy z,
roots r uh t s, severe s ax v iy r, severely s ax v iy r l iy, stronger s t r ao ng er,
toots t uh t s, wacko w ae k ow, wanna w aa n ax, whatnot w ah t n aa t, wok w aa k
"""
_ADDED = """
uh-hum ah m hh ah m, April ey p r ax l, Battle b ae t ax l, Chevy sh eh v iy,
Colorado k ao l ax r aa d ow, Colorado' k ao l ax r aa d ow z, Creek k r iy k,
Eleven ax l eh v ih n, Erie iy r iy, Forever f er eh v er, Friday f r ay d iy,
History hh ih s t r iy, Israel ih z r ih l, Israel's ih z r ih l z,
Lincoln l ih ng k ih n, Lincolns l ih ng k ih n z, NAACP eh n ey ey s iy p iy,
NIT eh n ay t iy, NTSC eh n t iy eh s s iy, Quarter k ow r t er,
Quarterback k ow r t er b ae k, Quarters k ow r t er z, Science s ay n s,
Sunday s ah n d iy, Sunday's s ah n d iy z, Sundays s ah n d iy z, Texan t eh k s ih n,
Texan's t eh k s ih n s, Thousands th aw z ih n z, Waco w ey k ow,
Weekends w iy k eh n z, acceptable eh k s eh p ax b ax l, accounting ax k aw n ih ng,
address ax d r eh s, already aa r d iy, am m, asked ae s t, attorney ih t er n iy,
autopilot ao t ow p ay l ih t, awfully ao f l iy, basketball b ae s k ax b ao l,
basketball's b ae s k ax b ao l z, become b ah k ah m, becomes b iy k ah m z,
began b ax g en n, bottle b aa t ax l, camera k ae m r ax, camera's k ae m r ax z,
cameras k ae m r ax z, capital k ae p ax l, carrying k ae r ih ng,
combination k aa m ih n ey sh ih n, combinations k aa m ih n ey sh ih n z,
contracts k aa n t r ae k s, costs k ao s, county k aw n iy,
cultural k ao l ch ax r ax l, culturally k ao l ch ax r ax l iy, culture k ao l ch er,
cultures k ao l ch er z, data d ey t ax, differently d ih f ax r ih n t l iy,
effects ax f eh k t s, election ax l eh k sh ih n, elections ax l eh k sh ih n z,
eleven ax l eh v ih n, enjoyable ae n jh oy ax b ax l, enjoys ae n jh oy z,
entire ih n t ay r, entirely ih n t ay r l iy, entirety ih n t ay r t iy,
extra eh k s t er, facts f ae k s, forever f er eh v er, forget f er r g eh t,
forgot f er r g aa t, forgotten f er r g aa t ax n, forward f ow er d,
frightening f r ay t n ih ng, full-time f ax l t ay m, garage g r aa jh,
grandmother g r ae m ah dh er, heavily hh eh v ax l iy, history hh ih s t r iy,
honestly aa n ax s t l iy, honesty aa n ax s t iy, horror hh ow r, houses hh aw z ih z,
huh-uh ah hh ah, hum-um ah m hh ah m, hunting hh ah n ih ng, ideal ay d iy l,
idealist ay d iy l ih s t, imagine m ae jh ih n, individuals ih n d ih v ih jh ax l z,
interest ih n t r ih s t, it'd ih d, lead l iy d, mandatory m ae n d ih t ow r iy,
minute m ih n ih t, mountains m aw t n z, mysteries m ih s t r iy z,
mystery m ih s t r iy, nervous n er v ih s, nobody n ow b ah d iy,
nobody'll n ow b ah d iy l, nobody's n ow b ah d iy z, nuclear n uw k l iy r,
onto aa n t ax, originally ax r ih jh ax l iy, particularly p er t ih k y ax l iy,
perfectly p er f ih k l iy, personally p er s n ax l iy, physically f ih z ih k l iy,
pilot p ay l ih t, pilot's p ay l ih t s, police p l iy s, prefer p er f er,
prepare p r ax p ey r, prescription p er s k r ih p sh ih n,
prescriptions p er s k r ih p sh ih n z, products p r aa d ax k s,
projects p r aa jh eh k s, protect p er t eh k t, protected p er t eh k t ih d,
protection p er t eh k sh ih n, protection p er t eh k t ih v, quarter k ow r t er,
read r iy d, rehabilitation r iy ax b ih l ih t ey sh ih n, resource r ih s ow r s,
resources r iy s ow r s ih z, roots r uw t s, science s ay n s, seventy s eh v ih n iy,
severe s ih v iy r, severely s ih v iy r l iy, software s ao f w ey r,
solid s ao l ih d, solidly s ao l ih d l iy, stood s t ih d, strictly s t r ih k l iy,
stronger s t r ao ng g er, supposed s p ow z, supposed s p ow s, tastes t ey s,
thoroughly th er r l iy, thousands th aw z ih n z, toots t uw t s, toward t w ow r d,
towards t w ow r d z, twenties t w eh n iy z, twentieth t w eh n iy ih th,
unacceptable ah n ae k s eh p ax b ax l, understand ah n d er s t ae n,
unless ih n l eh s, use y uw z, uses y uw z ih z, various v ah r iy ih s,
versus v er s ih z, wacko w ey k ow, wanna w ah n ax, whatnot w aa t n aa t,
whatsoever w aa t s ow eh v er, wok w ao k, wondering w ah n d r ih ng
"""


def taken_away() -> Iterator[Entry]:
    """Words and the pronunciations that they lose."""
    return _entries(_TAKEN_AWAY)


def added() -> Iterator[Entry]:
    """Words and the pronunciations that they get."""
    return _entries(_ADDED)


def _entries(table: str) -> Iterator[Entry]:
    for entry in table.replace("\n", " ").split(","):
        word, *phones = entry.split()
        yield word, tuple(phones)
