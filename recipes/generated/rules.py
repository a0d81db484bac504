"""The words of the generated conversations: a grammar written as plain text.

A line `name:` opens a rule; each following line is one alternative. A `$name` stands
for any alternative of that rule. Earlier alternatives are likelier (see grammar.py),
so a rule lists its commonest words first. `TOPICS` adds, for each topic of
conversation, the rules `thing`, `things`, `doing`, `place`, `claim` and `quality`;
each conversation has one topic, as each of Switchboard's calls had.
"""

COMMON = """
sentence:
  $statement
  $opener $statement
  $statement $tail
  $question
  $opener $statement $tail
  $statement $joint $statement
  $reply
reply:
  uh-huh yeah
  yeah right
  uh-huh uh-huh
  oh really
  oh yeah
  that's true
  i see
  oh okay
  yeah sure
  i know
  yeah i think so
  that's right
  oh that's $quality
  no not really
  yeah exactly
  i agree with that
  that makes sense
  wow that's amazing
  yeah me too
  oh my goodness
opener:
  well
  yeah
  and
  so
  but
  oh
  you know
  i mean
  no
  okay
  actually
  right
  anyway
  like i said
tail:
  you know
  i guess
  too
  though
  $time
  or something
  and things like that
  i think
  at all
  right now
  to be honest
joint:
  and
  but
  because
  so
  when
  if
  and then
  while
  since
question:
  do you have any $things
  do you like $doing
  what do you think about $doing
  have you ever tried $doing
  how often do you go to the $place
  what kind of $things do you like
  how many $things do you have
  do you think $claim
  where do you live
  did you see the $thing $time
  who taught you about $things
  why do you like the $thing so much
  is there a good $place near you
  how long have you been $doing
statement:
  i like $doing
  i have $number $things
  $claim
  we went to the $place $time
  my $person has a $quality $thing
  i think $claim
  we have a $thing at home
  i don't know much about $doing
  it was $degree $quality
  we usually go to the $place on $day
  my $person loves $doing
  it's $degree hard to find a $quality $thing
  i used to have a $thing when i was $stage
  $they say that $claim
  i really enjoy $doing with my $person
  the $thing was $degree $quality
  i would rather stay home than go to the $place
  i've been $doing for about $number $span
  my $person and i were $doing $time
  there are a lot of $things in $city
  i can't stand $doing
  we didn't have any $things back then
  that's the best $thing i ever had
  i live in $city
  $they should do something about the $things
  you have to be careful with the $things
  i bought a $thing from my $person $time
  i don't think $claim
  it costs about $number hundred dollars
  i've never been to the $place
  my $person works at the $place in $city
  we were thinking about getting another $thing
  you can get a $thing for $number dollars
  i wish i had more time for $doing
  my $person told me that $claim
  the only problem is the $things
  i heard about it on the $media
  i read about the $things in the paper
  i remember the first $thing we bought
  nobody ever talks about the $things
  we moved here from $city $number $span ago
  it takes $number $span to get to the $place
person:
  wife
  husband
  brother
  daughter
  son
  mother
  father
  sister
  friend
  neighbor
  boss
  cousin
  uncle
  grandmother
degree:
  really
  pretty
  very
  kind of
  just
  so
  not very
  a little
  quite
  fairly
  extremely
number:
  two
  three
  five
  four
  ten
  six
  twenty
  eight
  seven
  thirty
  twelve
  fifty
span:
  years
  months
  weeks
  hours
  days
  minutes
time:
  last week
  yesterday
  last year
  in the summer
  last night
  this morning
  on the weekend
  every day
  a while ago
  last month
  once in a while
  after work
  in the evening
  all the time
  before dinner
  during the winter
day:
  saturday
  sunday
  friday
  monday
  thursday
  tuesday
  wednesday
stage:
  a kid
  younger
  in college
  in high school
  growing up
  single
they:
  they
  people
  some people
  most people
city:
  texas
  dallas
  california
  boston
  chicago
  florida
  new york
  virginia
  atlanta
  denver
  michigan
  ohio
media:
  news
  radio
  television
  internet
"""

TOPICS = {
    "pets": """
thing:
  dog
  cat
  puppy
  horse
  rabbit
  parrot
things:
  dogs
  cats
  animals
  birds
  kittens
  fleas
doing:
  walking the dog
  feeding the cats
  training a puppy
  riding horses
place:
  animal shelter
  pet store
  farm
claim:
  cats are easier than dogs
  a dog needs a big yard
  animals are good for children
  he barks at everybody
  she sleeps under the bed
quality:
  friendly
  lazy
  cute
  smart
  noisy
""",
    "food": """
thing:
  cake
  salad
  sandwich
  kitchen
  pizza
  recipe
things:
  vegetables
  desserts
  apples
  spices
  potatoes
doing:
  cooking dinner
  eating out
  baking bread
  making soup
place:
  restaurant
  bakery
  grocery store
claim:
  the chicken was delicious
  fresh fish tastes better
  we eat too much sugar
  breakfast is the best meal
  the service was terrible
quality:
  spicy
  tasty
  healthy
  sweet
  simple
""",
    "work": """
thing:
  job
  office
  meeting
  computer
  project
  schedule
things:
  benefits
  managers
  customers
  computers
  deadlines
doing:
  working from home
  writing reports
  answering the phone
  looking for a job
place:
  office
  bank
  factory
claim:
  the company pays for the insurance
  they hired a new manager
  the hours are flexible
  i get a long vacation
  nobody likes the boss
quality:
  busy
  boring
  interesting
  important
  difficult
""",
    "house": """
thing:
  house
  garden
  fence
  couch
  lawn mower
  bathroom
things:
  trees
  flowers
  bedrooms
  weeds
  neighbors
doing:
  painting the house
  mowing the lawn
  planting tomatoes
  cleaning the basement
place:
  hardware store
  park
  old neighborhood
claim:
  the roof needs some work
  the taxes went up again
  roses need a lot of water
  we built a deck in the back
  the rent is pretty reasonable
quality:
  big
  nice
  tiny
  modern
  cheap
""",
    "travel": """
thing:
  trip
  camera
  tent
  hotel
  cruise
  flight
things:
  airports
  museums
  hotels
  tourists
  pictures
doing:
  camping in the woods
  going to europe
  flying with children
  fishing
place:
  airport
  island
  national park
claim:
  the flight was late again
  mexico is beautiful in january
  we drove across the country
  the hotel had a swimming pool
  traveling alone is no fun
quality:
  wonderful
  crowded
  long
  relaxing
  dangerous
""",
}

#: Words that a speaker breaks off, as MS-State writes them, and the sounds still said.
PARTIAL_WORDS = {
    "bought": ("bo[ught]-", 2),
    "dollars": ("do[llars]-", 2),
    "people": ("peo[ple]-", 2),
    "really": ("rea[lly]-", 2),
    "remember": ("rem[ember]-", 3),
    "problem": ("prob[lem]-", 4),
    "thinking": ("thin[king]-", 3),
    "usually": ("usu[ally]-", 3),
    "getting": ("ge[tting]-", 2),
    "company": ("com[pany]-", 3),
    "children": ("chil[dren]-", 3),
    "insurance": ("insu[rance]-", 3),
    "neighbor": ("nei[ghbor]-", 2),
    "daughter": ("dau[ghter]-", 2),
    "brother": ("bro[ther]-", 3),
    "hundred": ("hun[dred]-", 3),
    "careful": ("care[ful]-", 3),
    "saturday": ("sat[urday]-", 3),
    "california": ("cal[ifornia]-", 3),
    "another": ("ano[ther]-", 3),
    "restaurant": ("res[taurant]-", 3),
    "weekend": ("wee[kend]-", 3),
}
